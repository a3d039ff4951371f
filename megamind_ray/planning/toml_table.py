"""A table of a TOML file with its place in it: every value that is not allowed is named with where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megamind_ray.errors import RequestError
from megamind_ray.units import parse_bytes, parse_duration, parse_rate

__all__ = ["MAX_COUNT", "TomlTable"]

# More of anything than the largest cluster has; a typing error should not fill the memory with nodes.
MAX_COUNT: Final = 65536
# Beyond what any hardware does; products of such rates still are finite numbers.
_MIN_RATE: Final = 1.0
_MAX_RATE: Final = 1e18


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A TOML table with its place, whose keys are all known.

    Attributes:
        values: As parsed.
        where: File and tables above it, for messages.
    """

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, values: object, where: str, keys: tuple[str, ...]) -> TomlTable:
        """Takes a value for a table.

        Raises:
            RequestError: It is none, or has another key than these.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"{where}: {values!r:.40} must be a table with the keys {', '.join(keys)}")
        for key in values:
            if key not in keys:
                raise RequestError(f"{where}: unknown key {key!r}; there are {', '.join(keys)}")
        return cls(values, where)

    def table(self, key: str, keys: tuple[str, ...]) -> TomlTable | None:
        """The table ``[key]``; None where there is none."""
        return TomlTable.of(self.values[key], f"{self.where}: [{key}]", keys) if key in self.values else None

    def tables(self, key: str, keys: tuple[str, ...], *, required: bool = False) -> list[TomlTable]:
        """The tables ``[[key]]``."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or (required and not found):
            raise RequestError(
                f"{self.where}: write at least one [[{key}]] table"
                if required
                else f"{self.where}: {key} must be tables, [[{key}]]"
            )
        return [TomlTable.of(values, f"{self.where}: {key}[{position}]", keys) for position, values in enumerate(found)]

    def text(self, key: str, default: str | None = "") -> str:
        """A text; with None for a default it must be there."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise RequestError(
                f"{self.where}: {key} = {value!r:.40} must be a text"
                if key in self.values
                else f"{self.where}: {key} is missing"
            )
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, or None where there is none."""
        return self.text(key) if key in self.values else None

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of some texts; the first one where there is none."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise RequestError(f"{self.where}: {key} = {value!r:.40} must be one of {', '.join(choices)}")
        return value

    def integer(self, key: str, default: int | None, *, at_least: int = 0) -> int | None:
        """A whole number, or the default."""
        value = self.values.get(key, default)
        if key in self.values:
            value = self._whole(key, value, at_least)
        return None if value is None else int(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; it must be there."""
        values = self._present(key, "a list like [0, 1]")
        if not isinstance(values, list):
            raise RequestError(f"{self.where}: {key} = {values!r:.40} must be a list like [0, 1]")
        return tuple(self._whole(key, value, 0) for value in values)

    def count(self) -> int:
        """How many of a thing the table stands for; 1 where it does not say."""
        return self.integer("count", 1, at_least=1) or 1

    def flag(self, key: str) -> bool:
        """True or false; true where it does not say."""
        value = self.values.get(key, True)
        if not isinstance(value, bool):
            raise RequestError(f"{self.where}: {key} = {value!r:.40} must be true or false")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Bytes; without a default they must be there."""
        if key not in self.values and default is not None:
            return default
        return parse_bytes(self._present(key, "a size like '80GiB'"), what=f"{self.where}: {key}")

    def rate(self, key: str, default: float | None = None) -> float:
        """Bytes per second; without a default they must be there."""
        if key not in self.values and default is not None:
            return default
        rate = parse_rate(self._present(key, "a rate like '25GB/s'"), what=f"{self.where}: {key}")
        if not _MIN_RATE <= rate <= _MAX_RATE:
            raise RequestError(
                f"{self.where}: {key} = {self.values[key]!r:.40} must be from {_MIN_RATE:g} to {_MAX_RATE:g} bytes per "
                "second; correct it"
            )
        return rate

    def optional_rate(self, key: str) -> float | None:
        """Bytes per second, or None where there is none."""
        return self.rate(key) if key in self.values else None

    def duration(self, key: str, default: float) -> float:
        """Seconds, or the default."""
        return parse_duration(self.values.get(key, default), what=f"{self.where}: {key}")

    def frequency(self, key: str) -> float | None:
        """A plain number per second, more than 0; None where there is none."""
        value = self.values.get(key)
        if key not in self.values:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise RequestError(f"{self.where}: {key} = {value!r:.40} must be a number per second, more than 0")
        return float(value)

    def _whole(self, key: str, value: object, at_least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise RequestError(f"{self.where}: {key} = {value!r:.40} must be an integer of {at_least} or more")
        if value > MAX_COUNT:
            raise RequestError(f"{self.where}: {key} = {value!r:.40} is more than {MAX_COUNT}; correct it")
        return value

    def _present(self, key: str, what: str) -> Any:
        if key not in self.values:
            raise RequestError(f"{self.where}: {key} is missing; give {what}")
        return self.values[key]
