"""Identifiers. Each is a distinct type to mypy, so that a rank is never passed where a block is meant."""

from __future__ import annotations

import re
from typing import NewType

from megamind_ray.errors import RequestError

__all__ = [
    "BlockId",
    "ExtentId",
    "Generation",
    "LoadId",
    "ModelName",
    "NodeId",
    "Rank",
    "TensorId",
    "model_name",
]

NodeId = NewType("NodeId", str)
ModelName = NewType("ModelName", str)
LoadId = NewType("LoadId", str)
Rank = NewType("Rank", int)
TensorId = NewType("TensorId", int)
ExtentId = NewType("ExtentId", int)
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def model_name(text: str) -> ModelName:
    """Checks a name that a user gave to a model or a fleet; it becomes part of actor names.

    Raises:
        RequestError: It is no text, empty, too long or has characters other than letters, digits and ``._-``.
    """
    # From Python anything may come: None where a variable was not set.
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise RequestError(
            f"name {text!r:.80} cannot be used; "
            "take up to 128 letters, digits, '.', '_' or '-'; first a letter or digit"
        )
    return ModelName(text)
