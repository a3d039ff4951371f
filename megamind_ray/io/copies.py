"""Copies of a checkpoint: what shows that they are the same, and which of them is right (docs/design/0012)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import Location, parse_location
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.errors import AbsentError, IntegrityError, MegamindError, RequestError, SourceError, listed, masked
from megamind_ray.io.digests import FileDigest, digest_of_link
from megamind_ray.io.layout import find_layout
from megamind_ray.io.request_pool import run_requests
from megamind_ray.io.sidecar import sidecar_places
from megamind_ray.io.storage import Browser
from megamind_ray.io.verify import known_digests

__all__ = [
    "Conflict",
    "check_mirrors",
    "conflicts_of",
    "copy_digests",
    "mirror_of",
    "recorded_beside",
    "reference_notes",
    "require_files",
    "require_mirrors",
]

# Storages that have no checksum of any file, whatever they are asked.
_WITHOUT_DIGESTS: Final = ("http", "https", "memory")
# Questions to a storage wait for the network, not for a core.
_NUM_QUESTIONS: Final = IoConfig().remote_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A file of which the storages of two copies say that it is another one.

    Attributes:
        path: As ``FileInfo.path``.
        algorithm: As in ``FileDigest``.
        values: Path or URI of each copy, secrets masked -> what its own storage says.
    """

    path: str
    algorithm: str
    values: Mapping[str, str]

    def __str__(self) -> str:
        said = ", ".join(f"{value} of {uri}" for uri, value in self.values.items())
        return f"{self.path}: the copies are not the same file, by the {self.algorithm} that each storage has: {said}"


def mirror_of(manifest: Manifest, base: str) -> Manifest:
    """The same files in another folder, for ``verify_checksums``; a copy has its own times and tags.

    Raises:
        RequestError: ``base`` is no path or URI of a kind that is supported.
    """
    files = tuple(replace(file, mtime_ns=None, etag=None) for file in manifest.files)
    return replace(manifest, uri=base, root=parse_location(base).uri, files=files)


def require_files(copy: Manifest, *, retry: RetryConfig | None = None) -> None:
    """Makes sure that a mirror has all files, as long as they should be, before its bytes are looked at.

    Raises:
        RequestError: It lacks some; all are named. An ``AbsentError`` where it lacks all.
        IntegrityError: One of them has another size.
        SourceError: The storage does not answer.
    """
    browser, root = Browser(retry or RetryConfig()), parse_location(copy.root or "/")

    def look(file: FileInfo) -> int | RequestError:
        try:
            return _size_bytes(root.join(file.path), browser)
        except RequestError as error:
            return error

    sizes = run_requests(look, copy.files, num_in_flight=_NUM_QUESTIONS, on_failure=browser.stop.set)
    found = list(zip(copy.files, sizes, strict=True))
    lacking = [(file.path, size) for file, size in found if isinstance(size, RequestError)]
    if lacking:
        kind = AbsentError if len(lacking) == len(found) else RequestError
        raise kind(
            f"{copy.uri}: lacks {len(lacking)} of {len(found)} files ({listed([path for path, _ in lacking])}): "
            f"{lacking[0][1].message}"
        )
    for file, size in found:
        if size != file.size_bytes:
            raise IntegrityError(
                f"{copy.uri}: {file.path} has {size:,} bytes, and {file.size_bytes:,} in the copy that the headers "
                "were read from; fetch the one that is wrong again",
                file=root.join(file.path).uri,
            )


def copy_digests(copies: Sequence[Manifest], *, retry: RetryConfig | None = None) -> list[dict[int, FileDigest]]:
    """What to hold the files of each copy to: the checksums of its own storage.

    A file without any reference, of which its own storage knows nothing, is held to what that of another copy says. The
    checksum then has the name of that copy.
    """
    known = [known_digests(copy, retry=retry) for copy in copies]
    result = []
    for copy, own in zip(copies, known, strict=True):
        others: dict[int, FileDigest] = {}
        if copy.reference is None:
            for other, digests in zip(copies, known, strict=True):
                for file, digest in digests.items():
                    others.setdefault(file, replace(digest, copy=masked(other.uri)))
        result.append(others | own)
    return result


def conflicts_of(copies: Sequence[Manifest], digests: Sequence[Mapping[int, FileDigest]]) -> tuple[Conflict, ...]:
    """The files that are not the same in all copies by what their own storages say, where nothing else tells.

    Args:
        copies: Of the same checkpoint.
        digests: Of each, from ``copy_digests``.
    """
    found = []
    for file, info in enumerate(copies[0].files):
        said: dict[str, dict[str, str]] = {}
        for copy, known in zip(copies, digests, strict=True):
            digest = known.get(file)
            if copy.reference is None and digest is not None and not digest.copy:
                said.setdefault(digest.algorithm, {})[masked(copy.file_uri(file))] = digest.value
        found += [
            Conflict(path=masked(info.path), algorithm=algorithm, values=values)
            for algorithm, values in said.items()
            if len(set(values.values())) > 1
        ]
    return tuple(found)


def recorded_beside(uri: str, *, retry: RetryConfig | None = None) -> str | None:
    """The sidecar in the folder of a checkpoint, for copies of it, where the checkpoint itself cannot be opened."""
    (place,) = sidecar_places(parse_location(uri), (), is_single=False)
    try:
        return None if Browser(retry or RetryConfig()).read_if_any(place) is None else place.uri
    except MegamindError:
        return None  # one that cannot be read is none; what is wrong was said about the checkpoint already


def check_mirrors(uri: str, mirrors: Sequence[str], *, retry: RetryConfig | None = None) -> None:
    """Looks for one file of a checkpoint at each of its mirrors, so that a mistyped one is noticed before it is needed.

    One that does not answer just now is let pass, and so is a checkpoint that cannot be opened: opening it says more.

    Raises:
        RequestError: A mirror has not the same files.
    """
    browser = Browser(retry or RetryConfig())
    try:
        layout = find_layout(parse_location(uri), browser)
        path = layout.paths[0]
        size_bytes = _size_bytes(layout.root.join(path), browser)
    except MegamindError:
        return
    _require_file(uri, path, size_bytes, mirrors, browser)


def require_mirrors(manifest: Manifest, mirrors: Sequence[str], *, retry: RetryConfig | None = None) -> None:
    """As ``check_mirrors``, of a checkpoint that is open.

    Raises:
        RequestError: A mirror has not the same files.
    """
    if manifest.files:
        file = manifest.files[0]
        _require_file(manifest.uri, file.path, file.size_bytes, mirrors, Browser(retry or RetryConfig()))


def _require_file(uri: str, path: str, size_bytes: int, mirrors: Sequence[str], browser: Browser) -> None:
    for mirror in mirrors:
        try:
            found_bytes = _size_bytes(parse_location(mirror).join(path), browser)
        except SourceError:
            continue
        except RequestError as error:
            raise RequestError(
                f"the mirror {mirror} cannot be used for {uri}: {error.message}; name a folder that holds the same "
                "files"
            ) from error
        if found_bytes != size_bytes:
            raise RequestError(
                f"the mirror {mirror} cannot be used for {uri}: {path} has {found_bytes:,} bytes there and "
                f"{size_bytes:,} here; name a folder that holds the same files"
            )


def _size_bytes(location: Location, browser: Browser) -> int:
    with browser.open(location) as source:
        return source.size_bytes


def reference_notes(manifest: Manifest, mirrors: Sequence[str]) -> tuple[str, ...]:
    """What the report of a load without recorded checksums says about them; no request is made."""
    if manifest.reference is not None or not manifest.files:
        return ()
    path, root = manifest.files[0].path, parse_location(manifest.root or "/")
    notes = []
    if (root.is_local or root.scheme == "hf") and _may_have_digest(root.join(path)):
        notes.append(
            "no checksums were recorded, but the storage has some of whole files, which `megamind verify` checks; "
            "`megamind verify --record` makes those that every chunk of a load is held to"
        )
    notes += [
        f"mirror not usable: no recorded checksums show that {masked(mirror)} holds the same bytes "
        "(`megamind verify --record` makes them)"
        for mirror in mirrors
        if not (_may_have_digest(root.join(path)) and _may_have_digest(parse_location(mirror).join(path)))
    ]
    return tuple(notes)


def _may_have_digest(location: Location) -> bool:
    if location.is_local:
        return digest_of_link(location.uri) is not None
    return location.scheme not in _WITHOUT_DIGESTS
