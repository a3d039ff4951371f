"""Reading the numbers that family rules need from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Heads
from megamind_ray.errors import RequestError

__all__ = ["integer", "kv_heads", "query_heads"]


def integer(config: Mapping[str, object], *names: str) -> int:
    """The first of these settings that the configuration has.

    Raises:
        RequestError: It has none of them, or the value is not a positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"config.json: {name}={value!r:.80}; it must be a positive integer")
        return value
    raise RequestError(
        f"config.json of model_type={config.get('model_type')!r} lacks {names[0]!r}, which the split depends on; add it"
    )


def query_heads(config: Mapping[str, object], setting: str = "num_attention_heads") -> Heads:
    """The attention heads."""
    return Heads(count=integer(config, setting), setting=setting)


def kv_heads(config: Mapping[str, object]) -> Heads:
    """The key and value heads; without a setting of their own, as many as attention heads."""
    if config.get("num_key_value_heads") is None:
        return query_heads(config)
    return Heads(count=integer(config, "num_key_value_heads"), setting="num_key_value_heads", kv=True)
