"""Configurations of well-known models, by name: what their ``config.json`` says about sizes."""

from __future__ import annotations

import json
from importlib import resources

from megamind_ray.errors import RequestError

__all__ = ["ready_config", "ready_names"]

_SUFFIX = ".json"


def ready_names() -> tuple[str, ...]:
    """The names there are, sorted."""
    folder = resources.files(__package__) / "configs"
    return tuple(sorted(item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX)))


def ready_config(name: str) -> dict[str, object]:
    """The configuration of a model.

    Raises:
        RequestError: There is none of this name.
    """
    if name not in ready_names():
        raise RequestError(
            f"{name!r:.200}: no such folder, and no model of that name is known; known: {', '.join(ready_names())}. "
            "For another model give the folder that has its config.json"
        )
    text = (resources.files(__package__) / "configs" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    config: dict[str, object] = json.loads(text)
    return config
