"""Options of commands that take a model's ``config.json`` in place of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from megamind_ray.errors import RequestError

__all__ = ["Model", "ModelOrSettings", "Shapes", "WeightFormat", "which_model"]

Model: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="URI",
        show_default=False,
        help="A safetensors file or a folder of them: path, file:, s3://, gs://, az://, http(s)://, hf://, memory://. "
        "With --shapes: what has the model's config.json, or a model's name such as deepseek-v3.",
    ),
]
Shapes: TypeAlias = Annotated[
    bool,
    typer.Option("--shapes", help="Plan from the sizes in the model's config.json alone; nothing else is read."),
]
WeightFormat: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        show_default=False,
        help="With --shapes: bf16, fp8, int4 or mxfp4; default: what config.json says.",
    ),
]
ModelOrSettings: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE|DIR",
        help="TOML file with settings; MEGAMIND_* goes before it. Without a URI, a folder with a model's config.json: "
        "as --shapes.",
    ),
]


def which_model(model: str | None, config: Path | None, *, shapes: bool) -> tuple[str, bool, Path | None]:
    """What is planned, whether it is a model's shape, and the file with settings.

    Args:
        model: The argument of the command.
        config: ``--config``: settings, which are a TOML file, or a model's configuration.
        shapes: ``--shapes``.

    Raises:
        RequestError: There is no model, or there are two.
    """
    of_model = config is not None and (config.is_dir() or config.name == "config.json")
    if model is None and config is not None and not config.exists():
        raise RequestError(f"--config {config}: there is no such file or folder; give the folder of a config.json")
    if model is None and not of_model:
        raise RequestError(
            "missing argument URI: give a checkpoint, or for the shapes of a model the folder of its config.json "
            "(--config DIR) or a name (megamind plan deepseek-v3 --shapes)"
        )
    if not of_model:
        assert model is not None
        return model, shapes, config
    if model is not None:
        raise RequestError(
            f"--config {config}: that is a model's configuration, and {model!r} is a model too; leave one of them out "
            "(settings are a TOML file)"
        )
    return str(config), True, None
