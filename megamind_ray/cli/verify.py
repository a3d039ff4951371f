"""``megamind verify``: bytes against checksums, recorded ones and the storage's own, and the recording of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.exit_codes import FAILED
from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import AsJson, ConfigFile, Mirrors, SidecarPath, Uri, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import MegamindError, RequestError, listed, masked
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.config import Config
    from megamind_ray.core.manifest import Manifest
    from megamind_ray.io import VerifyResult
    from megamind_ray.io.digests import FileDigest

__all__ = ["EXAMPLES", "verify_command"]

_MAX_NAMES = 3
EXAMPLES = examples(
    "megamind verify --record /models/llama-3-8b       (once, from a copy you trust)",
    "megamind verify /models/llama-3-8b",
    "megamind verify /models/llama-3-8b --mirror s3://models/llama-3-8b     (which of the two is bad?)",
    "megamind verify s3://models/llama-3-8b --sidecar llama-checksums.json --json",
)


def verify_command(
    uri: Uri,
    record: Annotated[
        bool, typer.Option("--record", help="Record checksums of the checkpoint as it is now, replacing older ones.")
    ] = False,
    sidecar: SidecarPath = None,
    mirror: Mirrors = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Reads a whole checkpoint and compares every byte with the checksums that are known of it.

    Those that were recorded, and those that its storage has of whole files: in a Hugging Face cache, on hf://, and of
    many objects on s3://, gs:// and az://. Mirrors are held to the same checksums, which tells the bad copy from the
    good one; what the storage of the checkpoint does not know of a file, that of a mirror may.

    Exits with 0 when all bytes are as they should be, with 1 when some are not, and with 2 when no checksums are known:
    then there is nothing to compare with. Headers are checked in any case.
    """
    with Output(as_json) as output, terminated_as_interrupt():
        from megamind_ray.config import load_config

        settings = load_config(config, profile=not record)
        if record and mirror:
            raise RequestError("--record goes without --mirror: checksums are recorded from one copy, one you trust")
        if record:
            output.emit(*_record(uri, sidecar, settings))
            return
        results = _verify(uri, mirror or [], sidecar, settings)
        results = [(masked(name), result) for name, result in results]
        own, *mirrors = [_document(name, result) for name, result in results]
        ok = all(_is_ok(result) for _, result in results)
        document = {**own, "ok": ok, "mirrors": mirrors} if mirror else own
        output.emit(document, _verdicts(results))
    if not ok:
        raise typer.Exit(FAILED)


def _record(uri: str, path: str | None, settings: Config) -> tuple[dict[str, Any], str]:
    """Records checksums; what happened as a document and in words."""
    from megamind_ray.cli.progress import BytesProgress
    from megamind_ray.io import (
        default_sidecar_path,
        open_manifest,
        record_checksums,
        require_sidecar_place,
        write_sidecar,
    )
    from megamind_ray.report.tables import count_of

    manifest = open_manifest(uri, sidecar=False, io=settings.io, retry=settings.retry)
    target = default_sidecar_path(manifest) if path is None else path
    require_sidecar_place(target)
    with BytesProgress("recording") as progress:
        recorded = record_checksums(
            manifest,
            chunk_bytes=settings.io.chunk_bytes,
            io=settings.io,
            retry=settings.retry,
            on_progress=progress.show,
        )
    write_sidecar(recorded, target, retry=settings.retry)
    document: dict[str, Any] = {
        "uri": masked(uri),
        "recorded": masked(target),
        "chunk_bytes": recorded.chunk_bytes,
        "num_files": len(recorded.files),
        "num_chunks": sum(len(file.chunks_crc32) for file in recorded.files),
        "num_bytes": sum(file.size_bytes for file in recorded.files),
    }
    chunks, files = count_of(document["num_chunks"], "chunk"), count_of(document["num_files"], "file")
    return document, (
        f"recorded {chunks} of {format_bytes(recorded.chunk_bytes)} "
        f"({files}, {format_bytes(document['num_bytes'])}) in {masked(target)}"
    )


def _verify(
    uri: str, mirrors: Sequence[str], path: str | None, settings: Config
) -> list[tuple[str, VerifyResult | MegamindError]]:
    """What was found in the checkpoint itself, then in each mirror; an error where a mirror could not be read."""
    from megamind_ray.cli.progress import BytesProgress
    from megamind_ray.io import open_manifest
    from megamind_ray.io.verify import known_digests, mirror_of, verify_checksums

    manifest = open_manifest(uri, sidecar=path, io=settings.io, retry=settings.retry)
    digests: dict[int, FileDigest] = {}
    for copy in (manifest, *(mirror_of(manifest, mirror) for mirror in mirrors)):
        # What the storage of the first copy does not know of a file, that of another one may.
        digests = known_digests(copy, retry=settings.retry) | digests
    if manifest.reference is None and not digests:
        raise RequestError(
            f"{uri}: no checksums were recorded and its storage has none, so the {format_bytes(manifest.nbytes)} of "
            f"its {len(manifest.tensors):,} tensors cannot be checked (the headers are well formed); record them "
            f"from a copy you trust with `megamind verify --record {uri}`, or name a recording with --sidecar"
        )

    def check(name: str, copy: Manifest) -> VerifyResult:
        with BytesProgress(f"verifying {masked(name)}" if mirrors else "verifying") as progress:
            return verify_checksums(
                copy,
                digests=digests,
                io=settings.io,
                retry=settings.retry,
                on_progress=progress.show,
            )

    results: list[tuple[str, VerifyResult | MegamindError]] = [(uri, check(uri, manifest))]
    for mirror in mirrors:
        try:
            results.append((mirror, check(mirror, mirror_of(manifest, mirror))))
        except MegamindError as error:
            results.append((mirror, error))
    return results


def _is_ok(result: VerifyResult | MegamindError) -> bool:
    return not isinstance(result, MegamindError) and result.ok


def _document(uri: str, result: VerifyResult | MegamindError) -> dict[str, Any]:
    if isinstance(result, MegamindError):
        return {"uri": uri, "ok": False, "error": {"class": type(result).__name__, "message": result.message}}
    return {"uri": uri, "ok": result.ok, **asdict(result)}


def _verdicts(results: Sequence[tuple[str, VerifyResult | MegamindError]]) -> RenderableType:
    from rich.console import Group

    return Group(
        *(
            f"{uri}: CANNOT be read: {result.message}" if isinstance(result, MegamindError) else _verdict(uri, result)
            for uri, result in results
        )
    )


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
    lines += [
        Text(f"NOT what its storage says it is: {check}; fetch it again") for check in result.digests if not check.ok
    ]
    good = sum(check.ok for check in result.digests)
    if good:
        origins = ", ".join(dict.fromkeys(check.origin for check in result.digests))
        lines.append(
            Text(f"{uri}: {good} of {count_of(len(result.digests), 'file')} as their storage says ({origins})")
        )
    if result.unchecked:
        lines.append(Text(f"{uri}: not checked, for want of a checksum: {listed(result.unchecked)}"))
    return Group(*lines)


def _some(names: Sequence[str]) -> str:
    """A chunk can hold parts of hundreds of tensors; the document names all of them."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
