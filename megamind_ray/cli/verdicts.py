"""What ``megamind verify`` found, as a document and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megamind_ray.errors import AbsentError, MegamindError, listed
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.io import VerifyResult
    from megamind_ray.io.copies import Conflict
    from megamind_ray.io.verify import DigestCheck

__all__ = ["Findings"]

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found in the copies of a checkpoint.

    Attributes:
        results: Path or URI, secrets masked, and what was found there, or the error where it could not be read: the
            checkpoint itself first, then its mirrors.
        conflicts: Files of which the storages of two copies contradict each other.
    """

    results: tuple[tuple[str, VerifyResult | MegamindError], ...]
    conflicts: tuple[Conflict, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all copies were read and hold what they should."""
        return not self.conflicts and all(
            not isinstance(result, MegamindError) and result.ok for _, result in self.results
        )

    @property
    def only_absent(self) -> bool:
        """Whether all that is wrong is that mirrors have none of the files, as mistyped ones do."""
        bad = [result for _, result in self.results if isinstance(result, MegamindError) or not result.ok]
        return bool(bad) and not self.conflicts and all(isinstance(result, AbsentError) for result in bad)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: what was found in the checkpoint; with mirrors, also ``mirrors`` and ``conflicts``."""
        own, *mirrors = [_document(uri, result) for uri, result in self.results]
        if not mirrors:
            return own
        return {**own, "ok": self.ok, "mirrors": mirrors, "conflicts": [asdict(item) for item in self.conflicts]}

    def in_words(self) -> RenderableType:
        """For people."""
        from rich.console import Group
        from rich.text import Text

        lines: list[RenderableType] = [
            Text(f"{uri}: CANNOT be read: {result.message}")
            if isinstance(result, MegamindError)
            else _verdict(uri, result)
            for uri, result in self.results
        ]
        lines += [
            Text(f"CONFLICT, with nothing recorded to tell which is right: {conflict}") for conflict in self.conflicts
        ]
        return Group(*lines)


def _document(uri: str, result: VerifyResult | MegamindError) -> dict[str, Any]:
    if isinstance(result, MegamindError):
        return {"uri": uri, "ok": False, "error": {"class": type(result).__name__, "message": result.message}}
    return {"uri": uri, "ok": result.ok, **asdict(result)}


def _verdict(uri: str, result: VerifyResult) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from megamind_ray.report.tables import count_of, plain_table

    lines: list[RenderableType] = []
    if result.origin:
        compared = (
            f"{count_of(result.num_chunks, 'chunk')} and {count_of(result.num_files, 'header')}, "
            f"{format_bytes(result.num_bytes)}"
        )
        if result.mismatches:
            wrong = count_of(len(result.mismatches), "range")
            lines.append(
                Text(f"{uri}: NOT as recorded in {result.origin}: {wrong} of {compared}; fetch these files again")
            )
            rows = [
                (item.file, item.begin, item.end, "the header" if item.is_header else _some(item.tensors))
                for item in result.mismatches
            ]
            lines.append(plain_table(("file", ">from byte", ">to byte", "tensors"), rows))
        else:
            lines.append(f"{uri}: every byte is as recorded in {result.origin} ({compared})")
    lines += map(Text, _digest_lines(uri, result.digests))
    if result.unchecked:
        lines.append(Text(f"{uri}: not checked, for want of a checksum: {listed(result.unchecked)}"))
    return Group(*lines)


def _digest_lines(uri: str, checks: Sequence[DigestCheck]) -> Iterator[str]:
    from megamind_ray.report.tables import count_of

    for check in checks:
        if not check.ok and check.copy:
            yield f"differs from what the storage of {check.copy} says: {check}; one of the two copies is not right"
        elif not check.ok:
            yield f"NOT what its storage says it is: {check}; fetch it again"
    for copy in dict.fromkeys(check.copy for check in checks):
        of_copy = [check for check in checks if check.copy == copy]
        good = sum(check.ok for check in of_copy)
        if good:
            who = f"the storage of {copy}" if copy else "their storage"
            origins = ", ".join(dict.fromkeys(check.origin for check in of_copy))
            yield f"{uri}: {good} of {count_of(len(of_copy), 'file')} as {who} says ({origins})"


def _some(names: Sequence[str]) -> str:
    """A chunk can hold parts of hundreds of tensors; the document names all of them."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
