"""What the tensors of a quantised linear layer can express, and whether they are cut alike.

A linear layer has ``in`` and ``out`` features. Its tensors show them in different dims and with different grain:

====================  =========================  ==========================  =================================
format                weight                     scales                      others
====================  =========================  ==========================  =================================
none                  ``weight [out, in]``       -                           ``bias [out]``
FP8, block scales     ``weight [out, in]``       ``weight_scale_inv          ``input_scale []``
                                                 [out/128, in/128]``
FP8, per channel      ``weight [out, in]``       ``weight_scale [out, 1]``   ``input_scale []``
GPTQ                  ``qweight [in/8, out]``    ``scales [in/g, out]``      ``qzeros [in/g, out/8]``, ``g_idx [in]``
AWQ                   ``qweight [in, out/8]``    ``scales [in/g, out]``      ``qzeros [in/g, out/8]``
compressed-tensors,   ``weight_packed            ``weight_scale              ``weight_zero_point [out/8, in/g]``,
``pack-quantized``    [out, in/8]``              [out, in/g]``               ``weight_shape [2]``, of the whole
====================  =========================  ==========================  =================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megamind_ray.errors import RequestError

__all__ = ["Quantization", "layer_and_suffix", "quantization"]

# Schemes whose weights keep their shapes; what they pack after all has other names, which no rule matches.
_PACK_QUANTIZED = "compressed-tensors"
_UNPACKED = frozenset({_PACK_QUANTIZED, "fbgemm_fp8"})
_SUFFIX = re.compile(
    r"(.*?)(\.weight_scale_inv|\.weight_scale|\.input_scale|\.weight|\.bias|\.qweight|\.qzeros|\.scales|\.g_idx"
    r"|\.weight_packed|\.weight_shape|\.weight_zero_point|_scale_inv|_blocks|_scales|_bias)?",
    re.DOTALL,  # a name may have line ends
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The scheme of a checkpoint.

    Attributes:
        method: As the configuration names it, ``none`` without quantisation.
        block_out: Out features per row of FP8 block scales, 1 without.
        block_in: In features per column of FP8 block scales, 1 without.
        pack: Values in one int32 of GPTQ, AWQ and ``pack-quantized``.
        group: In features that share a scale in these; 0: all of them.
        act_order: GPTQ with ``desc_act``: groups are not contiguous.
    """

    method: str = "none"
    block_out: int = 1
    block_in: int = 1
    pack: int = 1
    group: int = 0
    act_order: bool = False

    @property
    def known(self) -> bool:
        """Whether the rules can split it."""
        return self.method in ("none", "fp8", "gptq", "awq", "mxfp4") or self.method in _UNPACKED

    @property
    def packs_rows(self) -> bool:
        """Whether each row is packed by itself, as ``weight_packed``."""
        return self.method == _PACK_QUANTIZED and self.pack > 1

    @property
    def out_unit(self) -> int:
        """Out features that cannot be parted."""
        return math.lcm(self.block_out, self.pack)

    @property
    def in_unit(self) -> int:
        """In features that cannot be parted."""
        if self.method == "mxfp4":
            return 32
        packed = self.pack if self.method in ("gptq", _PACK_QUANTIZED) else 1
        return math.lcm(self.block_in, packed, self.group or 1)

    @property
    def inner_unit(self) -> int:
        """For features that are the output of one layer and the input of the next, as inside an MLP."""
        return math.lcm(self.out_unit, self.in_unit)


def quantization(config: Mapping[str, object]) -> Quantization:
    """The scheme that ``quantization_config`` of a model's configuration names.

    Raises:
        RequestError: Its values cannot be understood.
    """
    raw = config.get("quantization_config")
    if not isinstance(raw, Mapping):
        return Quantization()
    method = str(raw.get("quant_method", "")).lower()
    if method == "fp8":
        block = raw.get("weight_block_size")
        if not block:
            return Quantization(method="fp8")
        if not (
            isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)
        ):
            raise RequestError(f"config.json: weight_block_size={block!r}; it must be two positive numbers")
        return Quantization(method="fp8", block_out=int(block[0]), block_in=int(block[1]))
    if method == "mxfp4":
        return Quantization(method="mxfp4")
    if method in ("gptq", "awq"):
        return _packed(raw, method)
    if method == _PACK_QUANTIZED and raw.get("format") == "pack-quantized":
        return _pack_quantized(raw)
    return Quantization(method=method or "none")


def _packed(raw: Mapping[str, object], method: str) -> Quantization:
    bits, group = raw.get("bits", 4), raw.get("group_size", 128)
    if not isinstance(bits, int) or bits < 1 or 32 % bits:
        # Values lie across the borders of int32s; nothing but whole tensors can be taken from that.
        return Quantization(method=f"{method} with bits={bits}")
    if not isinstance(group, int):
        raise RequestError(f"config.json: {method} with group_size={group!r}; it must be a number")
    return Quantization(
        method=method, pack=32 // bits, group=max(group, 0), act_order=method == "gptq" and bool(raw.get("desc_act"))
    )


def _pack_quantized(raw: Mapping[str, object]) -> Quantization:
    """Of compressed-tensors: ``config_groups`` names layers and says how their weights are packed."""
    groups = raw.get("config_groups")
    rows = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [row.get("weights") if isinstance(row, Mapping) else None for row in rows]
    schemes = [scheme for scheme in weights if isinstance(scheme, Mapping)]
    if not schemes or len(schemes) < len(rows):
        raise RequestError(
            f"config.json: compressed-tensors with config_groups={groups!r:.80}; each must be an object with weights"
        )
    found = {_pack_and_group(scheme) for scheme in schemes}
    if len(found) > 1:
        return Quantization(method=f"{_PACK_QUANTIZED} with groups that differ")
    return found.pop()


def _pack_and_group(scheme: Mapping[str, object]) -> Quantization:
    bits, group, order = scheme.get("num_bits", 4), scheme.get("group_size"), scheme.get("actorder")
    if not isinstance(bits, int) or bits < 1 or 32 % bits:
        return Quantization(method=f"{_PACK_QUANTIZED} with num_bits={bits!r:.20}")
    if order in ("group", True):
        # The groups of a rank's columns are scattered over all scales.
        return Quantization(method=f"{_PACK_QUANTIZED} with actorder={order}")
    if group is not None and not isinstance(group, int):
        raise RequestError(f"config.json: compressed-tensors with group_size={group!r:.80}; it must be a number")
    return Quantization(method=_PACK_QUANTIZED, pack=32 // bits, group=max(group or 0, 0))


def layer_and_suffix(name: str) -> tuple[str, str]:
    """``a.q_proj.weight`` -> (``a.q_proj``, ``.weight``), ``a.down_proj_scale_inv`` -> (``a.down_proj``, ...)."""
    match = _SUFFIX.fullmatch(name)
    assert match is not None
    return match[1], match[2] or ""
