"""gpt_oss: attention with sinks; experts whose gate and up features alternate, in MXFP4 or plain.

MXFP4 keeps 32 values in 16 bytes (``*_blocks [E, rows, cols/32, 16]``), with a scale each
(``*_scales [E, rows, cols/32]``).
"""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import ExpertShard, Replicate, Rule, Shard
from megamind_ray.planning.families.linear import replicated
from megamind_ray.planning.families.llama import attention, ends
from megamind_ray.planning.families.settings import query_heads
from megamind_ray.planning.quantization import Quantization, quantization

__all__ = ["gpt_oss_rules"]


def gpt_oss_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """A feature of the experts' inside is a pair of gate_up and one column of down; both are cut in equal steps."""
    quant = quantization(config)
    plain = Quantization()  # the scheme is that of the experts alone
    unit = quant.inner_unit
    layer = "*.mlp.experts"

    def split(name: str, dim: int, unit: int, per_index: int = 1) -> Rule:
        shard = Shard(dim=dim, unit=unit, features_per_index=per_index)
        return Rule(pattern=f"{layer}.{name}", placement=ExpertShard(inner=shard))

    return (
        *attention(config, plain),
        replicated("*.mlp.router.*"),
        Rule(pattern="*.self_attn.sinks", placement=Shard(dim=0, heads=query_heads(config))),
        split("gate_up_proj_blocks", 1, 2 * unit),
        split("gate_up_proj_scales", 1, 2 * unit),
        split("gate_up_proj_bias", 1, 2 * unit),
        split("gate_up_proj", 2, 2 * unit),
        split("down_proj_blocks", 2, unit, 32),
        split("down_proj_scales", 2, unit, 32),
        split("down_proj", 1, unit),
        Rule(pattern=f"{layer}.down_proj_bias", placement=ExpertShard(inner=Replicate())),
        *ends(),
    )
