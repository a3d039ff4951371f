from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from megamind_ray.core.manifest import Manifest
from megamind_ray.io import open_manifest

Shards = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Mapping[str, Any]], tuple[Any, Manifest]]:
    """A small causal language model of transformers with random weights, and its checkpoint, written once."""
    root = tmp_path_factory.mktemp("models")
    known: dict[str, tuple[Any, Manifest]] = {}

    def get(model_type: str, settings: Mapping[str, Any]) -> tuple[Any, Manifest]:
        if model_type not in known:
            config = transformers.AutoConfig.for_model(model_type, **settings)
            with torch.device("meta"):
                empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model = empty.to_empty(device="cpu")
            model.tie_weights()
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.data.normal_(generator=generator)
            folder = root / model_type
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
            save_file(
                {name: parameter.data for name, parameter in model.named_parameters()}, folder / "model.safetensors"
            )
            known[model_type] = model, open_manifest(folder)
        return known[model_type]

    return get


@pytest.fixture(scope="session")
def shards_of_transformers() -> Callable[[nn.Module, int, int], Shards]:
    return _shards_of_transformers


def _shards_of_transformers(model: Any, tp: int, rank: int) -> Shards:
    """What transformers' own tensor parallelism leaves of each parameter on a rank.

    Nothing is sent: the process group is torch's fake one, and each rank cuts its part out of the whole.
    """
    torch.distributed.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp))
        local: Shards = {}
        for name, whole in model.named_parameters():
            module = nn.Module()
            leaf = name.rpartition(".")[2]
            module.register_parameter(leaf, nn.Parameter(whole.detach()))
            if name in plan:
                ALL_PARALLEL_STYLES[plan[name]].shard_param(module, leaf, mesh)
            part = getattr(module, leaf)
            local[name] = (part.to_local() if hasattr(part, "to_local") else part).detach()
        return local
    finally:
        torch.distributed.destroy_process_group()
