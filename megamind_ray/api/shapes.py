"""A model by its configuration: for planning a checkpoint that is not here, or nowhere yet."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from megamind_ray.config import Config, RetryConfig
from megamind_ray.core.location import parse_location
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    from megamind_ray.core.location import Location
    from megamind_ray.core.manifest import Manifest

__all__ = ["CONFIG_NAME", "open_planned", "open_shapes"]

CONFIG_NAME: Final = "config.json"
_BARE_NAME: Final = re.compile(r"[\w.-]+")


def open_planned(
    uri: str | os.PathLike[str],
    *,
    shapes: bool,
    weights: str | None,
    sidecar: str | os.PathLike[str] | bool | None,
    config: Config,
) -> Manifest:
    """What a plan is made for: a checkpoint, or the shape of one.

    Args:
        uri: The checkpoint, or the model for ``open_shapes``.
        shapes: Whether it is a model.
        weights: As for ``open_shapes``.
        sidecar: As for ``open_manifest``.
        config: Settings.

    Raises:
        RequestError: It is not there, or arguments contradict each other.
        IntegrityError: A header is wrong.
        SourceError: The storage does not answer.
    """
    from megamind_ray.io import open_manifest

    if shapes:
        if sidecar not in (None, False):
            raise RequestError(f"sidecar={sidecar!r}: shapes have no bytes to hold to checksums; leave it out")
        return open_shapes(uri, weights=weights, retry=config.retry)
    if weights is not None:
        raise RequestError(
            f"weights={weights!r}: the weights of a checkpoint are stored as they are; leave it out, or plan for the "
            "shapes of the model alone (--shapes, shapes=True)"
        )
    return open_manifest(uri, sidecar=sidecar, io=config.io, retry=config.retry)


def open_shapes(
    model: str | os.PathLike[str], *, weights: str | None = None, retry: RetryConfig | None = None
) -> Manifest:
    """The manifest that a model's checkpoint would have; of the model only ``config.json`` is read.

    Args:
        model: A folder or URI with a ``config.json``, that file itself, or the name of a ready configuration. Where a
            file or folder is called like a ready one, the file or folder is meant.
        weights: Format of the weights (``planning.shapes.WEIGHTS``); None is that of the configuration.
        retry: Bounds of the attempts.

    Raises:
        RequestError: No such configuration, or nothing can be made of it.
        SourceError: The storage does not answer.
    """
    from megamind_ray.io.storage import Browser, PathKind
    from megamind_ray.planning.shapes import ready_config, ready_names, shape_manifest

    name, location, browser = os.fspath(model), parse_location(model), Browser(retry or RetryConfig())
    if _BARE_NAME.fullmatch(name) and browser.kind(location) is PathKind.MISSING:
        return shape_manifest(ready_config(name), weights=weights, uri=name)
    folder = location.split()[0] if location.name == CONFIG_NAME else location
    raw = browser.read_if_any(folder.join(CONFIG_NAME))
    if raw is None:
        raise RequestError(
            f"{folder.uri}: has no {CONFIG_NAME}, which the shapes of a model come from; give the folder that has it, "
            f"or the name of a model: {', '.join(ready_names())}"
        )
    # Relative paths are resolved as for a checkpoint, and the manifest is called as the user calls it.
    manifest = shape_manifest(_parsed(raw, folder.join(CONFIG_NAME)), weights=weights, uri=folder.uri)
    return replace(manifest, uri=name)


def _parsed(raw: bytes, location: Location) -> dict[str, object]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{location.uri}: not valid JSON ({error}); correct it") from error
    if not isinstance(config, dict):
        raise RequestError(f"{location.uri}: must be a JSON object with the model's configuration; correct it")
    return config
