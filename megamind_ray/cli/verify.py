"""``megamind verify``: bytes against recorded checksums, and the recording of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.exit_codes import FAILED
from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import AsJson, ConfigFile, SidecarPath, Uri, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import RequestError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.config import Config
    from megamind_ray.io import VerifyResult

__all__ = ["EXAMPLES", "verify_command"]

_MAX_NAMES = 3
EXAMPLES = examples(
    "megamind verify --record /models/llama-3-8b       (once, from a copy you trust)",
    "megamind verify /models/llama-3-8b",
    "megamind verify s3://models/llama-3-8b --sidecar llama-checksums.json --json",
)


def verify_command(
    uri: Uri,
    record: Annotated[
        bool, typer.Option("--record", help="Record checksums of the checkpoint as it is now, replacing older ones.")
    ] = False,
    sidecar: SidecarPath = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Reads a whole checkpoint and compares every byte with the checksums that were recorded for it.

    Exits with 0 when all bytes are as recorded, with 1 when some are not, and with 2 when no checksums were recorded:
    then there is nothing to compare with. Headers are checked in any case.
    """
    with Output(as_json) as output, terminated_as_interrupt():
        from megamind_ray.config import load_config

        settings = load_config(config, profile=not record)
        if record:
            output.emit(*_record(uri, sidecar, settings))
            return
        result = _verify(uri, sidecar, settings)
        output.emit({"uri": uri, "ok": result.ok, **asdict(result)}, _verdict(uri, result))
    if not result.ok:
        raise typer.Exit(FAILED)


def _record(uri: str, path: str | None, settings: Config) -> tuple[dict[str, Any], str]:
    """Records checksums; what happened as a document and in words."""
    from megamind_ray.cli.progress import BytesProgress
    from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar
    from megamind_ray.report.tables import count_of

    manifest = open_manifest(uri, sidecar=False, io=settings.io, retry=settings.retry)
    target = default_sidecar_path(manifest) if path is None else path
    with BytesProgress("recording") as progress:
        recorded = record_checksums(
            manifest,
            chunk_bytes=settings.io.chunk_bytes,
            threads=settings.io.read_threads,
            retry=settings.retry,
            on_progress=progress.show,
        )
    write_sidecar(recorded, target)
    document: dict[str, Any] = {
        "uri": uri,
        "recorded": target,
        "chunk_bytes": recorded.chunk_bytes,
        "num_files": len(recorded.files),
        "num_chunks": sum(len(file.chunks_crc32) for file in recorded.files),
        "num_bytes": sum(file.size_bytes for file in recorded.files),
    }
    chunks, files = count_of(document["num_chunks"], "chunk"), count_of(document["num_files"], "file")
    return document, (
        f"recorded {chunks} of {format_bytes(recorded.chunk_bytes)} "
        f"({files}, {format_bytes(document['num_bytes'])}) in {target}"
    )


def _verify(uri: str, path: str | None, settings: Config) -> VerifyResult:
    from megamind_ray.cli.progress import BytesProgress
    from megamind_ray.io import open_manifest, verify_checksums

    manifest = open_manifest(uri, sidecar=path, io=settings.io, retry=settings.retry)
    if manifest.reference is None:
        raise RequestError(
            f"{uri}: no checksums were recorded, so the {format_bytes(manifest.nbytes)} of its "
            f"{len(manifest.tensors):,} tensors cannot be checked (the headers are well formed); record them from a "
            f"copy you trust with `megamind verify --record {uri}`, or name a recording with --sidecar"
        )
    with BytesProgress("verifying") as progress:
        return verify_checksums(
            manifest, threads=settings.io.read_threads, retry=settings.retry, on_progress=progress.show
        )


def _verdict(uri: str, result: VerifyResult) -> RenderableType | str:
    from rich.console import Group
    from rich.text import Text

    from megamind_ray.report.tables import count_of, plain_table

    compared = (
        f"{count_of(result.num_chunks, 'chunk')} and {count_of(result.num_files, 'header')}, "
        f"{format_bytes(result.num_bytes)}"
    )
    if result.ok:
        return f"{uri}: every byte is as recorded in {result.origin} ({compared})"
    rows = [
        (item.file, item.begin, item.end, "the header" if item.is_header else _some(item.tensors))
        for item in result.mismatches
    ]
    headline = (
        f"{uri}: NOT as recorded in {result.origin}: {count_of(len(rows), 'range')} of {compared}; "
        "fetch these files again"
    )
    return Group(Text(headline), plain_table(("file", ">from byte", ">to byte", "tensors"), rows))


def _some(names: Sequence[str]) -> str:
    """A chunk can hold parts of hundreds of tensors; the document names all of them."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
