"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "Address",
    "AllowReplication",
    "AsJson",
    "ConfigFile",
    "Dp",
    "Ep",
    "Fleet",
    "Mirrors",
    "Pp",
    "RulesFile",
    "SidecarPath",
    "Tp",
    "Uri",
    "examples",
]

Uri: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        show_default=False,
        help="A safetensors file or a folder of them: path, file:, s3://, gs://, az://, http(s)://, hf://, memory://.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, nothing else.")]
Tp: TypeAlias = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
Pp: TypeAlias = Annotated[int, typer.Option("--pp", help="Pipeline stages.")]
Dp: TypeAlias = Annotated[int, typer.Option("--dp", help="Data-parallel replicas.")]
Ep: TypeAlias = Annotated[
    int,
    typer.Option("--ep", help="Expert-parallel groups; they fold over dp x tp."),
]
RulesFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", help="TOML or JSON rules that go before the built-in ones."),
]
AllowReplication: TypeAlias = Annotated[
    bool,
    typer.Option("--allow-replication", help="Replicate tensors without a rule, however many bytes they are."),
]
ConfigFile: TypeAlias = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings; MEGAMIND_* goes before it.")
]
SidecarPath: TypeAlias = Annotated[
    str | None,
    typer.Option("--sidecar", metavar="PATH", help="Recorded checksums; default: the ones beside the checkpoint."),
]
Mirrors: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror",
        metavar="URI",
        show_default=False,
        help="A folder or URI that holds the same files; repeat for more.",
    ),
]
Address: TypeAlias = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT|local", help="Ray cluster; default: $RAY_ADDRESS, or the one here."),
]
Fleet: TypeAlias = Annotated[str, typer.Option("--fleet", metavar="NAME", help="Which fleet of the cluster.")]


def examples(*lines: str) -> str:
    """The end of a command's help text. The first character tells click to keep the lines as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
