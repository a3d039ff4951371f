"""``megamind inspect``: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from megamind_ray.cli.options import AsJson, Uri, examples
from megamind_ray.cli.output import Output

__all__ = ["EXAMPLES", "inspect_command"]

EXAMPLES = examples(
    "megamind inspect /models/llama-3-8b",
    "megamind inspect s3://models/deepseek-v3 --json",
    "megamind inspect model.safetensors --tensors",
)


def inspect_command(
    uri: Uri,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows what is in a checkpoint. Reads headers only."""
    with Output(as_json) as output:
        from rich.console import Group

        from megamind_ray.io import open_manifest
        from megamind_ray.report.summary import summarize_manifest
        from megamind_ray.report.tables import manifest_tables, plain_table

        manifest = open_manifest(uri)
        summary = summarize_manifest(manifest)
        document: dict[str, Any] = summary.to_json()
        text = manifest_tables(summary)
        if tensors:
            listing = [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype.label,
                    "shape": list(tensor.shape),
                    "num_bytes": tensor.nbytes,
                    "file": manifest.files[tensor.file].path,
                    "begin": tensor.begin,
                }
                for tensor in manifest.tensors.values()
            ]
            document["tensors"] = listing
            columns = ("tensor", "dtype", "shape", ">bytes", "file", ">at")
            text = Group(text, "", plain_table(columns, [list(row.values()) for row in listing]))
        output.emit(document, text)
