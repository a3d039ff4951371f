"""From names on disk to the tensors of the module: the first of the three steps of docs/design/0002.

Modules of transformers 5 hold all experts of a layer in one tensor, while checkpoints keep one tensor per expert:
``gate`` (or ``w1``) and ``up`` (``w3``) ``[I, H]`` of each expert become ``experts.gate_up_proj [E, 2I, H]``, gate
first; ``down`` (``w2``) becomes ``experts.down_proj [E, H, I]``. Block scales (``weight_scale_inv``) are fused with
them. Per-expert tensors of packed formats (GPTQ, AWQ) and per-channel scales have no fused form in the module: they
keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.errors import RequestError

__all__ = ["FUSED_FAMILIES", "ModuleEntry", "module_entries", "num_experts", "split_numbers"]

# Whole numbers between dots, and the number of ``expert_3``.
# What is longer than nine digits is no layer and no expert.
_NUMBER = re.compile(r"(?:^|(?<=\.)|(?<=\.expert_))(\d{1,9})(?=\.|$)")

# Model types whose modules in transformers 5 have fused experts, by the naming on disk
# (transformers/conversion_mapping.py).
_W123 = frozenset({"mixtral", "minimax", "minimax_m2"})
_GATE_UP_DOWN = frozenset(
    {
        "afmoe",
        "beam",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm_moe_dsa",
        "hunyuan_v1_moe",
        "longcat_flash",
        "mellum",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_omni_moe_text",
        "qwen3_omni_moe_thinker",
        "sarvam_mla",
        "solar_open",
    }
)
FUSED_FAMILIES = _W123 | _GATE_UP_DOWN
_LEAVES = {
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
}
_GPT2_BASE = ("wte.", "wpe.", "h.", "ln_f.")
_SUFFIXES = {"weight": "", "weight_scale_inv": "_scale_inv"}
_Rename: TypeAlias = Callable[[str], str]
_COUNT_SETTINGS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A module tensor and the tensors on disk that it is made of.

    Attributes:
        names: Names in the module; more than one where weights are tied. The first is the one that is on disk.
        template: The first name with 0 for each whole number in it: equal for the same tensor of all layers.
        numbers: Those numbers.
        dtype: Element type.
        shape: Global shape.
        parts: Indices into the manifest's tensors. One group of one index for a tensor that is on disk as it is; else
            one group per block of dim 1 (gate, up), each with one index per expert of dim 0.
        fused: Whether ``parts`` are experts to be stacked.
    """

    names: tuple[str, ...]
    template: str
    numbers: tuple[str, ...]
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Int64Array, ...]
    fused: bool = False


@dataclass(slots=True)
class _Experts:
    """The parts of one fused tensor, while they are collected."""

    name: str
    disk_prefix: str
    parts: dict[str, dict[int, int]]


class _Collector:
    """Gathers the parts of fused tensors. Names are cut with ``partition``: a large model has 90,000 of them."""

    def __init__(self, model_type: str | None, rename: _Rename) -> None:
        self._model_type = model_type
        self._rename = rename
        # (module with the experts, projection and tensor) -> leaf of the fused tensor, None where there is none.
        self._leaves: dict[tuple[str, str], str | None] = {}
        self._collected: dict[tuple[str, str], _Experts] = {}

    def is_fusable(self, name: str) -> bool:
        module, found, rest = name.partition(".experts.")
        expert, _, part = rest.partition(".")
        # Only as people write it: "01" beside "1" would be the same expert.
        is_number = expert.isdecimal() and len(expert) < 10 and (expert == "0" or not expert.startswith("0"))
        return bool(found) and is_number and self._leaf(module, part) is not None

    def take(self, name: str, index: int) -> _Experts | None:
        """Notes a part; returns the fused tensor if it is its first."""
        module, _, rest = name.partition(".experts.")
        expert, _, part = rest.partition(".")
        leaf = self._leaf(module, part)
        assert leaf is not None
        experts = self._collected.get((module, leaf))
        is_first = experts is None
        if experts is None:
            fused = f"{self._rename(module + '.')}experts.{leaf}"
            experts = self._collected[module, leaf] = _Experts(fused, f"{module}.experts", {})
        experts.parts.setdefault(part, {})[int(expert)] = index
        return experts if is_first else None

    def _leaf(self, module: str, part: str) -> str | None:
        key = (module, part)
        if key not in self._leaves:
            self._leaves[key] = _fused_leaf(module, part, self._model_type)
        return self._leaves[key]


def _fused_leaf(module: str, part: str, model_type: str | None) -> str | None:
    projection, _, tensor = part.partition(".")
    known = projection in _LEAVES and tensor in _SUFFIXES and module.endswith((".mlp", ".block_sparse_moe"))
    family = _W123 if projection.startswith("w") else _GATE_UP_DOWN
    return _LEAVES[projection][0] + _SUFFIXES[tensor] if known and model_type in family else None


def split_numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """``model.layers.12.x`` -> (``model.layers.0.x``, (``12``,))."""
    pieces = _NUMBER.split(name)
    return "0".join(pieces[::2]), tuple(pieces[1::2])


def num_experts(config: Mapping[str, object]) -> int | None:
    """Routed experts of a layer, where the configuration says."""
    for setting in _COUNT_SETTINGS:
        value = config.get(setting)
        if isinstance(value, int) and value > 0:
            return value
    return None


def module_entries(manifest: Manifest) -> list[ModuleEntry]:
    """The tensors of the module, in the order in which the checkpoint has their first parts.

    Raises:
        RequestError: An expert is missing, or the experts of a layer differ in shape or dtype.
    """
    infos = list(manifest.tensors.values())
    rename = _renaming(manifest)
    aliases = _aliases(manifest, rename)
    collector = _Collector(manifest.model_type, rename)
    entries: list[ModuleEntry | _Experts] = []
    for index, info in enumerate(infos):
        if collector.is_fusable(info.name):
            experts = collector.take(info.name, index)
            if experts is not None:
                entries.append(experts)
            continue
        name = rename(info.name)
        template, numbers = split_numbers(name)
        names = (name, *aliases.get(info.name, ()))
        part = np.array([index], dtype=np.int64)
        entries.append(ModuleEntry(names, template, numbers, info.dtype, info.shape, (part,)))
    count = num_experts(manifest.config)
    return [_fuse(entry, infos, count) if isinstance(entry, _Experts) else entry for entry in entries]


def _aliases(manifest: Manifest, rename: _Rename) -> dict[str, tuple[str, ...]]:
    if not manifest.tied:
        return {}
    # A head that is on disk under an older name is not absent.
    present_names = {rename(name) for name in manifest.tensors}
    aliases: dict[str, tuple[str, ...]] = {}
    for absent, present in manifest.tied.items():
        alias = rename(absent)
        if alias not in present_names:
            aliases[present] = (*aliases.get(present, ()), alias)
    return aliases


def _renaming(manifest: Manifest) -> _Rename:
    """From a name on disk to that in the module, fused experts apart."""
    match manifest.model_type:
        case "bert":
            return lambda name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            )
        case "gpt_neox":
            return lambda name: "lm_head." + name.removeprefix("embed_out.") if name.startswith("embed_out.") else name
        case "gpt2" if _has_gpt2_head(manifest.config):
            # Checkpoints on the hub are of the base model, which a model with a head keeps in ``transformer``.
            return lambda name: f"transformer.{name}" if name.startswith(_GPT2_BASE) else name
        case model_type if model_type in _W123:
            return lambda name: name.replace(".block_sparse_moe.", ".mlp.")
    return lambda name: name


def _has_gpt2_head(config: Mapping[str, object]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and bool(architectures) and "GPT2Model" not in architectures


def _fuse(experts: _Experts, infos: list[TensorInfo], count: int | None) -> ModuleEntry:
    present = {expert for part in experts.parts.values() for expert in part}
    total = max(present) + 1 if count is None else count
    if max(present) >= total:
        raise RequestError(
            f"checkpoint has {experts.disk_prefix}.{max(present)}, but config.json says {total} experts; "
            f"correct config.json"
        )
    leaf = next(iter(experts.parts))
    wanted = [
        f"{other}.{leaf.partition('.')[2]}"
        for other, (target, _) in _LEAVES.items()
        if target == _LEAVES[leaf.partition(".")[0]][0] and other.startswith("w") == leaf.startswith("w")
    ]
    groups: list[Int64Array] = []
    for part in sorted(wanted, key=lambda name: _LEAVES[name.partition(".")[0]][1]):
        found = experts.parts.get(part, {})
        for expert in range(total):
            if expert not in found:
                raise RequestError(
                    f"{experts.name}: tensor {experts.disk_prefix}.{expert}.{part} is missing from the checkpoint; "
                    f"it needs one for each of its {total} experts"
                )
        groups.append(np.array([found[expert] for expert in range(total)], dtype=np.int64))
    return _stacked(experts.name, groups, infos)


def _stacked(name: str, groups: list[Int64Array], infos: list[TensorInfo]) -> ModuleEntry:
    first = infos[groups[0][0]]
    for index in np.concatenate(groups).tolist():
        info = infos[index]
        if info.shape != first.shape or info.dtype is not first.dtype or not info.shape:
            raise RequestError(
                f"{name}: its experts must be alike, but {first.name} is {first.dtype.label} {list(first.shape)} and "
                f"{info.name} is {info.dtype.label} {list(info.shape)}"
            )
    shape = (len(groups[0]), len(groups) * first.shape[0], *first.shape[1:])
    template, numbers = split_numbers(name)
    return ModuleEntry((name,), template, numbers, first.dtype, shape, tuple(groups), fused=True)
