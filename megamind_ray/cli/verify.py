"""``megamind verify``: bytes against checksums, recorded ones and the storage's own, and the recording of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.exit_codes import FAILED, WRONG_REQUEST
from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import AsJson, ConfigFile, Mirrors, SidecarPath, Uri, examples
from megamind_ray.cli.output import Output
from megamind_ray.cli.verdicts import Findings
from megamind_ray.errors import MegamindError, RequestError, masked
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from megamind_ray.config import Config
    from megamind_ray.core.manifest import Manifest
    from megamind_ray.io import VerifyResult

__all__ = ["EXAMPLES", "verify_command"]

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
    many objects on s3://, gs:// and az://. Mirrors are held to the same recorded checksums, which tells the bad copy
    from the good one, and each to those of its own storage; only where there are neither, to those of another copy's. A
    checkpoint that cannot be opened is reported, and its mirrors are checked all the same.

    Exits with 0 when all bytes are as they should be, with 1 when some are not, and with 2 when no checksums are known
    (then there is nothing to compare with) or all that is wrong is a mirror where no file is.
    Headers are checked in any case.
    """
    with Output(as_json) as output, terminated_as_interrupt():
        from megamind_ray.config import load_config

        settings = load_config(config, profile=not record)
        if record and mirror:
            raise RequestError("--record goes without --mirror: checksums are recorded from one copy, one you trust")
        if record:
            output.emit(*_record(uri, sidecar, settings))
            return
        findings = _verify(uri, mirror or [], sidecar, settings)
        output.emit(findings.to_json(), findings.in_words())
    if not findings.ok:
        raise typer.Exit(WRONG_REQUEST if findings.only_absent else FAILED)


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


def _verify(uri: str, mirrors: Sequence[str], path: str | None, settings: Config) -> Findings:
    """Checks the checkpoint itself, then each mirror."""
    from megamind_ray.cli.progress import BytesProgress
    from megamind_ray.io.copies import conflicts_of, copy_digests, mirror_of, require_files
    from megamind_ray.io.verify import verify_checksums

    manifest, failure = _first_readable(uri, mirrors, path, settings)
    readable = [] if failure else [(uri, manifest)]
    copies = [*readable, *((mirror, mirror_of(manifest, mirror)) for mirror in mirrors)]
    digests = copy_digests([copy for _, copy in copies], retry=settings.retry)
    if manifest.reference is None and not any(digests):
        raise RequestError(
            f"{uri}: no checksums were recorded and its storage has none, so the {format_bytes(manifest.nbytes)} of "
            f"its {len(manifest.tensors):,} tensors cannot be checked (the headers are well formed); record them "
            f"from a copy you trust with `megamind verify --record {uri}`, or name a recording with --sidecar"
            f"{_recorded_at(mirrors, settings)}"
        )
    results: list[tuple[str, VerifyResult | MegamindError]] = [(masked(uri), failure)] if failure else []
    for (name, copy), known in zip(copies, digests, strict=True):
        try:
            if copy is not manifest:
                require_files(copy, retry=settings.retry)
            with BytesProgress(f"verifying {masked(name)}" if mirrors else "verifying") as progress:
                result = verify_checksums(
                    copy, digests=known, io=settings.io, retry=settings.retry, on_progress=progress.show
                )
        except MegamindError as error:
            if not mirrors:
                raise
            results.append((masked(name), error))
        else:
            results.append((masked(name), result))
    return Findings(results=tuple(results), conflicts=conflicts_of([copy for _, copy in copies], digests))


def _recorded_at(mirrors: Sequence[str], settings: Config) -> str:
    """A recording that a mirror has beside it, which is not believed unless it is named: it may be what is bad."""
    from megamind_ray.io.copies import recorded_beside

    places = [place for mirror in mirrors if (place := recorded_beside(mirror, retry=settings.retry))]
    return f"; one lies beside a mirror: --sidecar {places[0]}" if places else ""


def _first_readable(
    uri: str, mirrors: Sequence[str], path: str | None, settings: Config
) -> tuple[Manifest, MegamindError | None]:
    """The headers of the checkpoint, or else of the first mirror that has them, and why not of the checkpoint."""
    from megamind_ray.io import open_manifest
    from megamind_ray.io.copies import recorded_beside

    io = replace(settings.io, mirrors=())  # those of loads, which an error would speak of
    try:
        return open_manifest(uri, sidecar=path, io=io, retry=settings.retry), None
    except MegamindError as error:
        failure = error
    for mirror in mirrors:
        recorded = recorded_beside(uri, retry=settings.retry) if path is None else path
        try:
            return open_manifest(mirror, sidecar=recorded, io=io, retry=settings.retry), failure
        except MegamindError:
            continue  # the checks of the copies say what is wrong with this one
    raise failure
