"""How weights are stored: which tensors a linear layer, or a stack of experts, has in each format.

=======  ==========================================================================================================
bf16     ``weight [out, in]``; also float16 and float32, where the configuration says so
fp8      ``weight [out, in]`` F8_E4M3, ``weight_scale_inv [out/128, in/128]`` F32, rounded up (DeepSeek-V3)
int4     ``weight_packed [out, in/8]`` I32, ``weight_scale [out, in/128]``, ``weight_shape [2]`` I64
         (compressed-tensors, ``pack-quantized``); ``weight_zero_point [out/8, in/128]`` I32 if asymmetric
mxfp4    of experts alone: ``*_blocks [experts, out, in/32, 16]`` U8, ``*_scales [experts, out, in/32]`` U8 (gpt-oss)
=======  ==========================================================================================================
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megamind_ray.core.tensor import DType
from megamind_ray.errors import RequestError
from megamind_ray.planning.quantization import Quantization, quantization
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["WEIGHTS", "Weights", "chosen_weights"]

WEIGHTS: Final = ("bf16", "fp8", "int4", "mxfp4")
_DTYPES: Final = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}
_MXFP4_BLOCK: Final = 32
# What is written for a format that the configuration does not set up itself.
_SCHEMES: Final[Mapping[str, Mapping[str, object]]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 128,
                    "symmetric": True,
                },
            }
        },
    },
    "mxfp4": {"quant_method": "mxfp4"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(ABC):
    """A format. Embeddings, norms, routers and the head are plain in all of them.

    Attributes:
        dtype: Of plain tensors.
        targets: Layers that the scheme is for; ``Linear`` is all of them.
        excepted: Layers that stay plain all the same.
    """

    dtype: DType
    targets: tuple[str, ...] = ("Linear",)
    excepted: tuple[str, ...] = ()

    def plain(self, name: str, *shape: int) -> TensorShape:
        """A tensor that no scheme touches."""
        return TensorShape(name, self.dtype, shape)

    def linear(self, layer: str, num_out: int, num_in: int, *, bias: bool = False) -> Iterator[TensorShape]:
        """The tensors of a linear layer ``[out, in]``.

        Raises:
            RequestError: The format cannot hold this shape.
        """
        if self._covers(layer):
            yield from self._stored(layer, num_out, num_in)
        else:
            yield self.plain(f"{layer}.weight", num_out, num_in)
        if bias:
            yield self.plain(f"{layer}.bias", num_out)

    def experts(self, name: str, num_experts: int, num_out: int, num_in: int) -> Iterator[TensorShape]:
        """The tensors of one projection of experts that are stacked on disk too (gpt-oss), their biases apart.

        Raises:
            RequestError: The format cannot hold this shape.
        """
        # What the module multiplies by from the right.
        yield self.plain(name, num_experts, num_in, num_out)

    @abstractmethod
    def _stored(self, layer: str, num_out: int, num_in: int) -> Iterator[TensorShape]: ...

    def _covers(self, layer: str) -> bool:
        return any(target == "Linear" or _matches(layer, target) for target in self.targets) and not any(
            _matches(layer, pattern) for pattern in self.excepted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain(Weights):
    def _stored(self, layer: str, num_out: int, num_in: int) -> Iterator[TensorShape]:
        yield self.plain(f"{layer}.weight", num_out, num_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockFp8(Weights):
    scheme: Quantization

    def _stored(self, layer: str, num_out: int, num_in: int) -> Iterator[TensorShape]:
        yield TensorShape(f"{layer}.weight", DType.F8_E4M3, (num_out, num_in))
        blocks = (-(-num_out // self.scheme.block_out), -(-num_in // self.scheme.block_in))
        yield TensorShape(f"{layer}.weight_scale_inv", DType.F32, blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedInt(Weights):
    scheme: Quantization
    symmetric: bool

    def _stored(self, layer: str, num_out: int, num_in: int) -> Iterator[TensorShape]:
        group = self.scheme.group or num_in
        if num_in % group:
            raise RequestError(
                f"{layer}: its {num_in} in features are no multiple of the group of {group} that share a scale; "
                "take other weights, or another group_size in the quantization_config of config.json"
            )
        pack = self.scheme.pack
        yield TensorShape(f"{layer}.weight_packed", DType.I32, (num_out, -(-num_in // pack)))
        yield self.plain(f"{layer}.weight_scale", num_out, num_in // group)
        yield TensorShape(f"{layer}.weight_shape", DType.I64, (2,))
        if not self.symmetric:
            yield TensorShape(f"{layer}.weight_zero_point", DType.I32, (-(-num_out // pack), num_in // group))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mxfp4(Weights):
    def _stored(self, layer: str, num_out: int, num_in: int) -> Iterator[TensorShape]:
        yield self.plain(f"{layer}.weight", num_out, num_in)

    def experts(self, name: str, num_experts: int, num_out: int, num_in: int) -> Iterator[TensorShape]:
        if num_in % _MXFP4_BLOCK:
            raise RequestError(
                f"{name}: its {num_in} in features are no multiple of {_MXFP4_BLOCK}; take other weights"
            )
        rows = (num_experts, num_out, num_in // _MXFP4_BLOCK)
        yield TensorShape(f"{name}_blocks", DType.U8, (*rows, _MXFP4_BLOCK // 2))
        yield TensorShape(f"{name}_scales", DType.U8, rows)


def chosen_weights(
    config: Mapping[str, object], weights: str | None, supported: tuple[str, ...]
) -> tuple[Weights, dict[str, object]]:
    """The format, and the configuration with the ``quantization_config`` that says so.

    Args:
        config: The model's configuration.
        weights: One of ``WEIGHTS``; None is what the configuration says itself.
        supported: Formats that checkpoints of the family have.

    Raises:
        RequestError: The format is not known, not one of the family's, or the configuration's own has a layout that is
            not known here.
    """
    own = _own_scheme(config)
    kind = _kind(own) if weights is None else weights
    if weights is not None and weights not in WEIGHTS:
        raise RequestError(f"weights={weights!r}: not known; take one of {', '.join(WEIGHTS)}")
    # Packed integers of eight bits are laid out as those of four, but only a configuration can ask for them.
    if kind not in supported and not (kind == "int8" and "int4" in supported):
        asked = f"weights={kind!r}" if weights else f"config.json: quantization_config is of the kind {kind!r}"
        raise RequestError(
            f"{asked}, for which no layout of a {config.get('model_type')} is known; take weights from "
            f"{', '.join(supported)}, or give the checkpoint itself"
        )
    scheme: Mapping[str, object] | None = None
    if kind != "bf16":
        scheme = own if own is not None and _kind(own) == kind else _SCHEMES[kind]
    adapted = {name: value for name, value in config.items() if name != "quantization_config"}
    if scheme is not None:
        adapted["quantization_config"] = scheme
    dtype = DType.BF16 if weights == "bf16" else _plain_dtype(config)
    return _weights(dtype, scheme, quantization(adapted)), adapted


def _own_scheme(config: Mapping[str, object]) -> Mapping[str, object] | None:
    own = config.get("quantization_config")
    if own is not None and not isinstance(own, Mapping):
        raise RequestError(f"config.json: quantization_config={own!r:.80}; it must be an object")
    return own


def _kind(own: Mapping[str, object] | None) -> str:
    """Which format a configuration's own scheme is."""
    if own is None:
        return "bf16"
    quant = quantization({"quantization_config": own})
    if quant.method == "fp8":
        return "fp8" if quant.block_out * quant.block_in > 1 else "fp8 without weight_block_size"
    if quant.method == "compressed-tensors" and quant.pack > 1:
        return f"int{32 // quant.pack}"
    return quant.method


def _plain_dtype(config: Mapping[str, object]) -> DType:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return DType.BF16
    dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise RequestError(f"config.json: torch_dtype={value!r:.80}; it must be one of {', '.join(_DTYPES)}")
    return dtype


def _weights(dtype: DType, scheme: Mapping[str, object] | None, quant: Quantization) -> Weights:
    if scheme is None:
        return _Plain(dtype=dtype)
    if quant.method == "mxfp4":
        return _Mxfp4(dtype=dtype)
    if quant.method == "fp8":
        return _BlockFp8(dtype=dtype, scheme=quant, excepted=_texts(scheme, "modules_to_not_convert"))
    groups = scheme["config_groups"]
    assert isinstance(groups, Mapping), "quantization() has read it"
    return _PackedInt(
        dtype=dtype,
        scheme=quant,
        symmetric=all(group["weights"].get("symmetric", True) for group in groups.values()),
        targets=tuple(target for group in groups.values() for target in _texts(group, "targets")),
        excepted=_texts(scheme, "ignore"),
    )


def _texts(scheme: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = scheme.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"config.json: quantization_config has {name}={value!r:.80}; it must be a list of names")
    return tuple(value)


def _matches(layer: str, pattern: str) -> bool:
    """Whether a scheme's list names a layer: itself, a module around it, its last names, a glob or ``re:``."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], layer) is not None
        except re.error as error:
            raise RequestError(f"config.json: quantization_config has the pattern {pattern!r:.80}: {error}") from error
    glob = pattern.strip(".")
    return any(fnmatch.fnmatchcase(layer, form) for form in (glob, f"{glob}.*", f"*.{glob}"))
