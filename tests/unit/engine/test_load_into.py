from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import megamind_ray as mm
from megamind_ray.config import Config
from megamind_ray.engine.module_load import load_module


class Net(nn.Module):
    """Two layers, a buffer that is saved and one that is not."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(32, hidden)
        self.second = nn.Linear(hidden, 8, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.fixture
def trained() -> Net:
    torch.manual_seed(3)
    net = Net()
    net.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    return net


@pytest.fixture
def checkpoint(trained: Net, tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    save_file({name: tensor.detach() for name, tensor in trained.state_dict().items()}, path)
    return path


def _same(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_parameters_and_buffers_are_filled_in_place(trained: Net, checkpoint: Path) -> None:
    net = Net()
    before = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}

    result = mm.load_into(net, checkpoint)

    assert _same(net, trained)
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == before
    assert sorted(result.loaded) == ["first.bias", "first.weight", "scale", "second.weight"]
    assert (result.missing, result.unexpected, result.still_meta) == ((), (), ())
    assert result.summary.totals.payload_bytes == sum(tensor.nbytes for tensor in net.state_dict().values())


def test_another_dtype_is_converted_as_copy_does(trained: Net, checkpoint: Path) -> None:
    net = Net().bfloat16()

    mm.load_into(net, checkpoint)

    assert net.first.weight.dtype == torch.bfloat16
    assert torch.equal(net.first.weight, trained.first.weight.bfloat16())


def test_a_parameter_that_is_not_contiguous_is_filled(trained: Net, checkpoint: Path) -> None:
    net = Net()
    net.first.weight = nn.Parameter(torch.zeros(32, 48).t())

    mm.load_into(net, checkpoint)

    assert torch.equal(net.first.weight, trained.first.weight)


def test_meta_parameters_become_real_ones(trained: Net, checkpoint: Path) -> None:
    with torch.device("meta"):
        net = Net()
    net.second.weight.requires_grad_(False)

    result = mm.load_into(net, checkpoint)

    assert _same(net, trained)
    assert net.first.weight.requires_grad
    assert not net.second.weight.requires_grad
    assert isinstance(net.first.weight, nn.Parameter)
    assert result.still_meta == ("cache",)


def test_missing_and_unexpected_names_are_listed_and_nothing_is_written(checkpoint: Path) -> None:
    net = Net()
    net.extra = nn.Linear(4, 4)
    del net.second
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    with pytest.raises(
        mm.RequestError,
        match=r"lacks extra\.weight, extra\.bias; the module has no place for second\.weight; .*strict=False",
    ):
        mm.load_into(net, checkpoint)

    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(trained: Net, checkpoint: Path) -> None:
    net = Net()
    net.extra = nn.Linear(4, 4, bias=False)
    del net.second

    result = mm.load_into(net, checkpoint, strict=False)

    assert (result.missing, result.unexpected) == (("extra.weight",), ("second.weight",))
    assert torch.equal(net.first.weight, trained.first.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_listed_and_nothing_is_written(checkpoint: Path, strict: bool) -> None:
    net = Net(hidden=40)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    with pytest.raises(
        mm.RequestError,
        match=r"first\.weight is \[40, 32\] in the module and \[48, 32\] in the checkpoint; first\.bias is .*second",
    ):
        mm.load_into(net, checkpoint, strict=strict)

    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_damaged_file_leaves_a_meta_module_as_it_was(
    checkpoint: Path, record: Callable[[Path], Any], config: Config, storage: Any
) -> None:
    manifest = record(checkpoint)
    storage.flip_at, storage.flips_left = manifest.files[0].size_bytes - 1, -1
    with torch.device("meta"):
        net = Net()

    with pytest.raises(mm.IntegrityError):
        load_module(net, manifest, config, strict=True, opener=storage)

    assert all(tensor.is_meta for tensor in net.state_dict().values())


def test_modules_that_tie_their_weights_take_either_name(tmp_path: Path) -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    net["b"].weight = net["a"].weight
    values = torch.randn(4, 4)
    path = tmp_path / "tied.safetensors"
    save_file({"b.weight": values}, path)

    result = mm.load_into(net, path)

    assert torch.equal(net["a"].weight, values)
    assert net["a"].weight is net["b"].weight
    assert result.missing == ()


class TiedByData(nn.Module):
    """Two parameters of the same memory, as some models tie them: neither is the other object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64, 1024))
        self.second = nn.Parameter(torch.zeros(64, 1024))
        self.second.data = self.first.data


def test_parameters_that_share_their_memory_are_one(tmp_path: Path) -> None:
    stored = {name: torch.full((64, 1024), value) for name, value in (("first", 1.0), ("second", 2.0))}
    save_file(stored, tmp_path / "both.safetensors")
    save_file({"second": stored["second"]}, tmp_path / "one.safetensors")
    net = TiedByData()

    result = mm.load_into(net, tmp_path / "both.safetensors")
    assert torch.equal(net.first, stored["first"])
    assert result.summary.totals.payload_bytes == stored["first"].nbytes
    assert sorted(result.loaded) == ["first", "second"]

    assert not mm.load_into(net, tmp_path / "one.safetensors").missing
    assert torch.equal(net.first, stored["second"])


def test_an_expanded_view_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    net = nn.Module()
    net.register_buffer("first", torch.zeros(64))
    net.register_buffer("repeated", torch.zeros(1, 64).expand(4, 64))
    save_file({"first": torch.ones(64), "repeated": torch.ones(4, 64)}, tmp_path / "net.safetensors")

    with pytest.raises(mm.RequestError, match=r"repeated is an expanded view.*clone\(\)"):
        mm.load_into(net, tmp_path / "net.safetensors")

    assert not net.get_buffer("first").any()


def test_tied_meta_parameters_stay_tied(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        net["b"].weight = net["a"].weight
    path = tmp_path / "tied.safetensors"
    save_file({"a.weight": torch.randn(4, 4)}, path)

    mm.load_into(net, path)

    assert net["a"].weight is net["b"].weight
    assert not net["a"].weight.is_meta


def test_one_stored_tensor_fills_two_parameters_of_a_module_that_unties_them(llama: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    tensors = {name: tensor for name, tensor in llama.tensors.items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | {
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    embedding = tensors["model.embed_tokens.weight"]
    net = nn.Module()
    net.model = nn.Module()
    net.model.embed_tokens = nn.Embedding(*embedding.shape, dtype=torch.bfloat16)
    net.lm_head = nn.Linear(*reversed(embedding.shape), bias=False, dtype=torch.bfloat16)

    mm.load_into(net, folder, strict=False)

    assert torch.equal(net.lm_head.weight, embedding)
    assert torch.equal(net.model.embed_tokens.weight, embedding)
    assert net.lm_head.weight.data_ptr() != net.model.embed_tokens.weight.data_ptr()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small Mixtral of transformers and its checkpoint, with one tensor per expert."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_stored_one_by_one_land_in_the_fused_parameters_of_transformers(
    mixtral: tuple[Any, Path], device: str
) -> None:
    model, folder = mixtral
    assert any(".experts.3." in name for name in mm.inspect(folder).tensors)
    with torch.device(device):
        other = type(model)(model.config)

    mm.load_into(other, folder)

    assert _same(other, model)


def test_a_module_that_keeps_experts_apart_takes_them_by_their_names_on_disk(mixtral: tuple[Any, Path]) -> None:
    _, folder = mixtral
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    stored = mm.load_state_dict(folder, include=name)[name]
    net = nn.Module()
    owner = net
    for part in name.split(".")[:-1]:
        owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner.weight = nn.Parameter(torch.zeros_like(stored))

    mm.load_into(net, folder, strict=False)

    assert torch.equal(owner.weight, stored)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_partial_dtensor_is_refused_by_name(checkpoint: Path, one_process: Any) -> None:
    from torch.distributed.tensor import Partial

    net = Net()
    net.first.weight = nn.Parameter(DTensor.from_local(torch.zeros(48, 32), one_process, [Partial()]))

    with pytest.raises(mm.RequestError, match=r"first\.weight is a DTensor with placements .* cannot be loaded"):
        mm.load_into(net, checkpoint)


PLACEMENTS = {"first": Shard(0), "second": Shard(1), "bias": Replicate(), "odd": Shard(0)}


@pytest.fixture(params=[2, 3])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of two or three as its rank 1 sees it. Nothing is communicated, so the others need not exist.

    Always one and the same rank: torch remembers what it computed for a mesh, and no process ever changes its rank.
    """
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=request.param)
    yield init_device_mesh("cpu", (request.param,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_reads_its_own_shards_of_dtensors(device: str, mesh: Any, tmp_path: Path) -> None:
    whole = {
        "first": torch.randn(48, 3200),
        "second": torch.randn(8, 48),
        "bias": torch.randn(48),
        "odd": torch.randn(5, 7),
    }
    save_file(whole, tmp_path / "net.safetensors")
    net = nn.ParameterDict()
    for name, placement in PLACEMENTS.items():
        start = torch.full(whole[name].shape, -1.0, device=device)
        net[name] = nn.Parameter(distribute_tensor(start, mesh, [placement], src_data_rank=None))

    result = mm.load_into(net, tmp_path / "net.safetensors")

    own_bytes = 0
    for name, placement in PLACEMENTS.items():
        got = net[name]
        expected = distribute_tensor(whole[name], mesh, [placement], src_data_rank=None).to_local()
        assert isinstance(got, nn.Parameter)
        assert isinstance(got.data, DTensor)
        assert (got.shape, got.placements) == (whole[name].shape, (placement,))
        assert torch.equal(got.to_local(), expected), name
        own_bytes += expected.nbytes
    # Gaps of up to 4 KiB, here between the rows of a column shard and small neighbours, are read over.
    assert own_bytes <= result.summary.totals.payload_bytes <= own_bytes + (8 << 10)


def test_a_stored_copy_of_a_buffer_that_the_module_makes_itself_is_passed_over(trained: Net, tmp_path: Path) -> None:
    """Checkpoints of older releases hold position ids and the like, which today's modules do not save."""
    path = tmp_path / "older.safetensors"
    save_file({**{name: it.detach() for name, it in trained.state_dict().items()}, "cache": torch.ones(2)}, path)
    net = Net()

    result = mm.load_into(net, path)

    assert _same(net, trained)
    assert result.unexpected == ()
    assert net.cache.tolist() == [0.0, 0.0]
