"""Values from several origins, the later ones winning, made into one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_origin

from megamind_ray.config.sections import Config
from megamind_ray.core.field_types import type_hints
from megamind_ray.errors import RequestError
from megamind_ray.units import parse_bytes

__all__ = ["Layer", "build", "overridden"]

Layer = tuple[str, Mapping[str, Mapping[str, object]]]
"""Where values come from, and the values by section and field."""

_MAX_DIGITS = 18


def build(layers: Sequence[Layer]) -> Config:
    """The configuration that all layers together give.

    Raises:
        RequestError: A key that is not known, or a value that is not allowed; the message names where it comes from.
    """
    values: dict[str, dict[str, object]] = {}
    for origin, layer in layers:
        _merge(values, layer, origin)
    sections = type_hints(Config)
    return Config(**{name: sections[name](**fields) for name, fields in values.items()})


def overridden(config: Config, values: Mapping[str, Mapping[str, object]], origin: str) -> Config:
    """A configuration with some settings changed.

    Args:
        config: The others.
        values: By section and field; texts are converted, as those of the environment are.
        origin: Where they come from, for messages.

    Raises:
        RequestError: A key that is not known, or a value that is not allowed.
    """
    merged: dict[str, dict[str, object]] = {}
    _merge(merged, values, origin)
    sections = {name: replace(getattr(config, name), **fields) for name, fields in merged.items()}
    return replace(config, **sections)


def _merge(values: dict[str, dict[str, object]], new: Mapping[str, Mapping[str, object]], origin: str) -> None:
    sections = type_hints(Config)
    for section, fields in new.items():
        if section not in sections:
            raise RequestError(
                f"{origin}: no section {section!r} in the configuration; there are {', '.join(sections)}"
            )
        if not isinstance(fields, Mapping):
            raise RequestError(f"{origin}: {section} = {fields!r} must be a section with settings")
        hints = type_hints(sections[section])
        for name, value in fields.items():
            if name not in hints:
                raise RequestError(f"{origin}: no setting {section}.{name}; there are {', '.join(hints)}")
            values.setdefault(section, {})[name] = _convert(value, hints[name], f"{origin}: {section}.{name}")


def _convert(value: object, kind: Any, what: str) -> object:
    """A TOML or text value as the field's type; byte sizes may carry a unit."""
    if kind is int and what.endswith("_bytes"):
        return parse_bytes(value, what=what)  # type: ignore[arg-type]
    if _is_huge(value):
        raise RequestError(f"{what}: the number has more than {_MAX_DIGITS} digits; take a smaller one")
    if kind is bool and isinstance(value, str) and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError as error:
            raise RequestError(f"{what} = {value!r}: not a number") from error
    if get_origin(kind) is Literal:
        return value  # the section itself says which are allowed
    if get_origin(kind) is tuple:
        return _texts(value, what)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"{what} = {value!r}: must be of type {kind.__name__}")
    return value


def _is_huge(value: object) -> bool:
    """Whether it is a whole number that neither a float nor a message can hold."""
    if isinstance(value, str):
        return len(value) > _MAX_DIGITS and value.strip().isdigit()
    return isinstance(value, int) and not -(10**_MAX_DIGITS) < value < 10**_MAX_DIGITS


def _texts(value: object, what: str) -> tuple[str, ...]:
    """A list of texts; as one text, as in an environment variable, they are separated by commas."""
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{what} = {value!r}: must be a list of texts")
    return tuple(value)
