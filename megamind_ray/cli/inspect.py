"""``megamind inspect``: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from megamind_ray.cli.options import AsJson, ConfigFile, Uri, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import masked
from megamind_ray.report.terminal import printable

__all__ = ["EXAMPLES", "inspect_command"]

_COLUMNS = ("name", "dtype", "shape", "num_bytes", "file")
# One absurdly long name does not widen the lines of all others.
_MAX_COLUMN = 120
EXAMPLES = examples(
    "megamind inspect /models/llama-3-8b",
    "megamind inspect s3://models/deepseek-v3 --json",
    "megamind inspect model.safetensors --tensors",
)


def inspect_command(
    uri: Uri,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Shows what is in a checkpoint. Reads headers only."""
    with Output(as_json) as output:
        from megamind_ray.config import load_config
        from megamind_ray.io import open_manifest
        from megamind_ray.report.summary import summarize_manifest
        from megamind_ray.report.tables import manifest_tables

        settings = load_config(config)
        manifest = open_manifest(uri, io=settings.io, retry=settings.retry)
        summary = summarize_manifest(manifest)
        document: dict[str, Any] = summary.to_json()
        lines: list[str] = []
        if tensors:
            rows = [
                (
                    tensor.name,
                    tensor.dtype.label,
                    list(tensor.shape),
                    tensor.nbytes,
                    masked(manifest.files[tensor.file].path),
                )
                for tensor in manifest.tensors.values()
            ]
            document["tensors"] = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
            lines = ["", *_listing(rows)]
        output.emit(document, manifest_tables(summary), lines)


def _listing(rows: Sequence[tuple[str, str, list[int], int, str]]) -> Iterator[str]:
    names = [printable(row[0]) for row in rows]
    width = min(_MAX_COLUMN, max(map(len, names), default=0))
    for name, (_, dtype, shape, num_bytes, file) in zip(names, rows, strict=True):
        yield f"{name:<{width}}  {dtype:<11}  {shape!s:<20}  {num_bytes:>15,}  {printable(file)}"
