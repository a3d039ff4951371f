"""Reading a model's configuration: every number is checked, and an error names the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from megamind_ray.errors import RequestError

__all__ = ["EXPERTS", "HEADS", "LAYERS", "WIDTH", "Fields"]

# More than any model has. What is larger is a typing error, and would fill memory before anybody sees it.
WIDTH: Final = 1 << 24
HEADS: Final = 1 << 16
LAYERS: Final = 4096
EXPERTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Fields:
    """A model's configuration.

    Attributes:
        values: The content of its ``config.json``.
    """

    values: Mapping[str, object]

    def count(self, *names: str, most: int = WIDTH, least: int = 1, default: int | None = None) -> int:
        """The first of these fields that is there and not null.

        Args:
            names: Names of the field; releases of transformers differ in some.
            most: Largest value that can be meant.
            least: Smallest value.
            default: For a configuration without the field; None: the field must be there.

        Raises:
            RequestError: The field is missing, no integer, or out of bounds.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"config.json: {name}={value!r:.80}; it must be an integer")
            if not least <= value <= most:
                raise RequestError(f"config.json: {name}={_short(value)}; it must be from {least} to {most}")
            return value
        if default is None:
            raise RequestError(f"config.json: {names[0]!r} is missing, which the shapes depend on; add it")
        return default

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A field that is true or false.

        Raises:
            RequestError: It is neither.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"config.json: {name}={value!r:.80}; it must be true or false")
        return value

    def indices(self, name: str) -> frozenset[int]:
        """A list of numbers of layers, empty where it is missing.

        Raises:
            RequestError: It is something else.
        """
        value = self.values.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise RequestError(f"config.json: {name}={value!r:.80}; it must be a list of integers")
        return frozenset(value)

    def head_dim(self, default: int | None = None) -> int:
        """The size of an attention head; where no field says it, the default, or the hidden size over the heads.

        Raises:
            RequestError: A field is wrong, or the heads do not divide the hidden size.
        """
        if self.has("head_dim") or default is not None:
            return self.count("head_dim", most=HEADS, default=default)
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads", most=HEADS)
        if hidden % heads:
            raise RequestError(
                f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}; "
                "correct one of them, or add head_dim"
            )
        return hidden // heads

    def key_value_heads(self) -> int:
        """Key and value heads; without a field of their own, as many as attention heads.

        Raises:
            RequestError: A field is wrong, or they do not divide the attention heads.
        """
        heads = self.count("num_attention_heads", most=HEADS)
        keys = self.count("num_key_value_heads", most=HEADS, default=heads)
        if heads % keys:
            raise RequestError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={keys}; "
                "correct one of them"
            )
        return keys


def _short(value: int) -> str:
    # A number of thousands of digits is not even turned into text.
    return str(value) if -(1 << 64) < value < 1 << 64 else f"a number of {value.bit_length()} bits"
