"""``config.json`` -> the manifest of a checkpoint that need not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tied import tied_names
from megamind_ray.errors import RequestError
from megamind_ray.planning.shapes.deepseek_v3 import deepseek_v3_tensors
from megamind_ray.planning.shapes.fields import Fields
from megamind_ray.planning.shapes.files import lay_out
from megamind_ray.planning.shapes.formats import Weights, chosen_weights
from megamind_ray.planning.shapes.gpt_oss import gpt_oss_tensors
from megamind_ray.planning.shapes.llama import llama_tensors, mistral_tensors, qwen2_tensors, qwen3_tensors
from megamind_ray.planning.shapes.mixtral import mixtral_tensors
from megamind_ray.planning.shapes.qwen3_moe import qwen3_moe_tensors
from megamind_ray.planning.shapes.tensors import TensorShape
from megamind_ray.units import format_bytes

__all__ = ["FAMILIES", "Family", "shape_manifest"]

# Ten times what the largest models have; beyond, the configuration is wrong, and planning would take all memory.
_MAX_TENSORS: Final = 1 << 20
_MAX_BYTES: Final = 1 << 50
# What a checkpoint grows with, for messages.
_SIZES: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
    "vocab_size",
)
_Tensors: TypeAlias = Callable[[Fields, Weights], Iterator[TensorShape]]


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of a ``model_type`` look.

    Attributes:
        tensors: From configuration and format to the tensors, in the order of the module.
        weights: Formats that its checkpoints come in.
    """

    tensors: _Tensors
    weights: tuple[str, ...] = ("bf16", "fp8", "int4")


FAMILIES: Final[Mapping[str, Family]] = {
    "deepseek_v3": Family(deepseek_v3_tensors),
    "gpt_oss": Family(gpt_oss_tensors, ("bf16", "mxfp4")),
    "llama": Family(llama_tensors),
    "mistral": Family(mistral_tensors),
    "mixtral": Family(mixtral_tensors),
    "qwen2": Family(qwen2_tensors),
    "qwen3": Family(qwen3_tensors),
    "qwen3_moe": Family(qwen3_moe_tensors),
}


def shape_manifest(config: Mapping[str, object], *, weights: str | None = None, uri: str) -> Manifest:
    """The manifest that ``io.open_manifest`` would give for a checkpoint of this model; there are no files behind it.

    Args:
        config: The model's configuration, as in its ``config.json``.
        weights: Format of the weights, one of ``WEIGHTS``; None is that of the configuration.
        uri: What the manifest is called: the folder of the configuration, or a name.

    Raises:
        RequestError: The family or the format is not known, or a field is missing or cannot be right.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise RequestError(
            f"config.json: model_type={model_type!r:.80}: no shapes are known for it, only for "
            f"{', '.join(FAMILIES)}; give the checkpoint itself, its headers say the rest"
        )
    stored, adapted = chosen_weights(config, weights, family.weights)
    files, tensors = lay_out(_bounded(family.tensors(Fields(config), stored), config))
    return Manifest(
        uri=uri,
        root=uri.rstrip("/"),
        files=files,
        tensors=tensors,
        config=adapted,
        tied=tied_names(adapted, tensors.keys()),
    )


def _bounded(tensors: Iterator[TensorShape], config: Mapping[str, object]) -> Iterator[TensorShape]:
    total = 0
    for count, tensor in enumerate(tensors):
        total += tensor.nbytes
        if count >= _MAX_TENSORS or total > _MAX_BYTES:
            sizes = ", ".join(f"{name}={config[name]!r:.40}" for name in _SIZES if config.get(name) is not None)
            limit = f"{_MAX_TENSORS:,} tensors" if count >= _MAX_TENSORS else format_bytes(_MAX_BYTES)
            raise RequestError(f"config.json: the model would have more than {limit}; correct its sizes: {sizes}")
        yield tensor
