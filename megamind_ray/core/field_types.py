"""Whether what was read from a file is of the types that its dataclass names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["require_field_types", "type_hints"]


@cache
def type_hints(cls: Any) -> Mapping[str, Any]:
    """As ``typing.get_type_hints``, which compiles every annotation again at each call."""
    return get_type_hints(cls)


def require_field_types(read: Any, *, ignored: frozenset[str] = frozenset()) -> None:
    """Looks at the fields of a dataclass, and at those of dataclasses in them.

    Args:
        read: The dataclass, made from what a file said.
        ignored: Fields that are not looked at.

    Raises:
        TypeError: A value is not of the field's type, or no finite number; the message names the field.
    """
    kind: Any = type(read)
    hints = type_hints(kind)
    for field in fields(read):
        value = getattr(read, field.name)
        if field.name not in ignored and not _is_of(value, hints[field.name]):
            raise TypeError(f"{field.name} = {value!r:.80} has another type")


def _is_of(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(each, arguments[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_of(each, arguments[1]) for each in value.values())
    if hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
        require_field_types(value)
        return True
    return isinstance(value, hint)
