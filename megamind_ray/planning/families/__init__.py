"""Built-in rules by ``model_type``: each family is a function from a model's configuration to rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.bert import bert_rules
from megamind_ray.planning.families.deepseek import deepseek_v3_rules
from megamind_ray.planning.families.gpt2 import gpt2_rules
from megamind_ray.planning.families.gpt_neox import gpt_neox_rules
from megamind_ray.planning.families.gpt_oss import gpt_oss_rules
from megamind_ray.planning.families.llama import llama_rules
from megamind_ray.planning.families.moe import mixtral_rules, qwen3_moe_rules
from megamind_ray.planning.families.switch_transformers import switch_transformers_rules

__all__ = ["FAMILIES", "family_rules"]

FAMILIES: Mapping[str, Callable[[Mapping[str, object]], tuple[Rule, ...]]] = {
    "llama": llama_rules,
    "mistral": llama_rules,
    "qwen2": llama_rules,
    "qwen3": llama_rules,
    "mixtral": mixtral_rules,
    "qwen3_moe": qwen3_moe_rules,
    "deepseek_v3": deepseek_v3_rules,
    "gpt_oss": gpt_oss_rules,
    "gpt_neox": gpt_neox_rules,
    "gpt2": gpt2_rules,
    "bert": bert_rules,
    "switch_transformers": switch_transformers_rules,
}


def family_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """The rules of the family that ``config["model_type"]`` names, none for one that is not known.

    Raises:
        RequestError: The configuration lacks a number that the rules need.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        return ()
    return tuple(replace(rule, origin=f"built-in {model_type}") for rule in family(config))
