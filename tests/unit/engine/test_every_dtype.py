"""Every dtype of the format, bit for bit, by every way into memory; what torch lacks comes as packed bytes or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as reference_load_file

import megamind_ray as mm
from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.tensor import DType
from megamind_ray.device.arena import HostArena
from megamind_ray.device.dtypes import torch_dtype
from megamind_ray.engine.local_load import load_plan

ROWS, COLUMNS = 8, 8
QUERY, OUT, NORM = (
    f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm")
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": COLUMNS,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 8,
}
KNOWN = [dtype for dtype in DType if torch_dtype(dtype) is not None]
LACKING = [dtype for dtype in DType if torch_dtype(dtype) is None]
every_dtype = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
each_known = pytest.mark.parametrize("dtype", KNOWN, ids=lambda dtype: dtype.label)
each_lacking = pytest.mark.parametrize("dtype", LACKING, ids=lambda dtype: dtype.label)


@dataclass(frozen=True)
class Stored:
    """A folder with a matrix that is split by rows, one split by columns, a vector, and what its bytes are."""

    folder: Path
    dtype: DType
    content: dict[str, tuple[list[int], bytes]]

    def rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor, a row for each of its rows."""
        shape, content = self.content[name]
        return np.frombuffer(content, np.uint8).reshape(shape[0] if len(shape) > 1 else 1, -1)


@pytest.fixture
def stored(dtype: DType, tmp_path: Path, write_raw: Callable[..., Path]) -> Stored:
    draw = random.Random(dtype.label)

    def content(*shape: int) -> tuple[list[int], bytes]:
        nbytes = dtype.nbytes(int(np.prod(shape)))
        assert nbytes is not None
        raw = draw.randbytes(nbytes)  # all bit patterns: NaNs with payloads, denormals, negative zeros
        return list(shape), bytes(byte & 1 for byte in raw) if dtype is DType.BOOL else raw

    tensors = {
        QUERY: content(ROWS, COLUMNS),
        OUT: content(ROWS, COLUMNS),
        NORM: content(COLUMNS),
        "empty": content(0, COLUMNS),
    }
    if dtype.bits >= 8:
        tensors["scalar"] = content()
    write_raw(
        tmp_path / "model.safetensors", {name: (dtype.label, shape, raw) for name, (shape, raw) in tensors.items()}
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return Stored(tmp_path, dtype, tensors)


def packed(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shape_in_torch(dtype: DType, shape: list[int]) -> list[int]:
    """Sub-byte elements are counted in bytes; those of F4 in pairs, which is the same."""
    return shape if dtype.bits >= 8 else [*shape[:-1], shape[-1] * dtype.bits // 8]


def assert_holds(tensors: dict[str, torch.Tensor], stored: Stored) -> None:
    expected_dtype = torch_dtype(stored.dtype) or torch.uint8
    assert tensors.keys() == stored.content.keys()
    for name, (shape, content) in stored.content.items():
        assert tensors[name].dtype == expected_dtype
        assert list(tensors[name].shape) == shape_in_torch(stored.dtype, shape)
        assert packed(tensors[name]) == content


def test_the_dtypes_that_torch_lacks_are_the_ones_that_are_known_to_be_lacking() -> None:
    assert {dtype.label for dtype in LACKING} <= {"F6_E2M3", "F6_E3M2", "F4", "F8_E8M0"}
    assert {"F6_E2M3", "F6_E3M2"} <= {dtype.label for dtype in LACKING}


@pytest.mark.parametrize(
    ("dtype", "other"), [(DType.F4, torch.float32), (DType.F4, torch.uint8), (DType.C64, torch.float32)]
)
def test_conversions_that_torch_lacks_or_that_lose_a_part_are_refused(stored: Stored, other: torch.dtype) -> None:
    module = module_for(stored, other)

    with pytest.raises(mm.RequestError, match=r"scalar|q_proj.* in the checkpoint"):
        mm.load_into(module, stored.folder)


@each_known
def test_a_file_as_the_safetensors_library_has_it(stored: Stored) -> None:
    path = stored.folder / "model.safetensors"

    loaded, expected = mm.load_file(path), reference_load_file(path)

    assert_holds(loaded, stored)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in loaded.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()
    }


@every_dtype
def test_a_state_dict_with_packed_bytes_for_what_torch_lacks(stored: Stored) -> None:
    assert_holds(mm.load_state_dict(stored.folder, raw=True), stored)


@each_lacking
@pytest.mark.parametrize("load", [mm.load_state_dict, lambda folder: mm.load_file(folder / "model.safetensors")])
def test_what_torch_lacks_is_refused_by_name_unless_bytes_are_asked_for(stored: Stored, load: Any) -> None:
    with pytest.raises(mm.RequestError, match=rf"tensor '.*': torch .* has no dtype for {stored.dtype.label}"):
        load(stored.folder)


def module_for(stored: Stored, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """A module with a buffer for each tensor."""
    module = torch.nn.Module()
    for name, (shape, _) in stored.content.items():
        owner = module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        nbytes = int(np.prod(shape_in_torch(stored.dtype, shape))) * dtype.itemsize
        buffer = torch.zeros(nbytes, dtype=torch.uint8).view(dtype).reshape(shape_in_torch(stored.dtype, shape))
        owner.register_buffer(leaf, buffer.to(device))
    return module


@every_dtype
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_of_that_dtype(stored: Stored, device: str) -> None:
    module = module_for(stored, torch_dtype(stored.dtype) or torch.uint8, device)

    mm.load_into(module, stored.folder)

    assert_holds(dict(module.state_dict()), stored)


@each_lacking
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packed_bytes_are_not_taken_for_numbers_by_a_module(stored: Stored, device: str) -> None:
    module = module_for(stored, torch.float32, device)

    with pytest.raises(mm.RequestError, match=rf"{stored.dtype.label}.*packed bytes"):
        mm.load_into(module, stored.folder)

    assert all(tensor.dtype == torch.float32 for tensor in module.state_dict().values())


@every_dtype
@pytest.mark.parametrize("through_pool", [False, True], ids=["direct", "pool"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_slices_of_ranks(
    stored: Stored,
    plan_for: Callable[..., Any],
    config: Config,
    pool_config: Config,
    through_pool: bool,
    tp: int,
) -> None:
    settings = pool_config if through_pool else config
    plan, manifest = plan_for(stored.folder, Parallel(tp=tp), settings)

    done = load_plan(plan, manifest, settings, [HostArena(1 << 20) for _ in range(tp)])

    for rank, session in enumerate(done.sessions):
        tensors = session.state_dict()
        assert packed(tensors[QUERY]) == np.split(stored.rows(QUERY), tp, axis=0)[rank].tobytes()
        assert packed(tensors[OUT]) == np.split(stored.rows(OUT), tp, axis=1)[rank].tobytes()
        assert packed(tensors[NORM]) == stored.rows(NORM).tobytes()
        assert {tensor.dtype for tensor in tensors.values()} == {torch_dtype(stored.dtype) or torch.uint8}
        assert list(tensors[QUERY].shape) == shape_in_torch(stored.dtype, [ROWS // tp, COLUMNS])
        assert list(tensors[OUT].shape) == shape_in_torch(stored.dtype, [ROWS, COLUMNS // tp])


@every_dtype
def test_a_plan_says_which_tensors_ranks_hold_as_packed_bytes(
    stored: Stored, plan_for: Callable[..., Any], config: Config
) -> None:
    plan, _ = plan_for(stored.folder, Parallel(), config)

    is_said = any(f"no dtype for {stored.dtype.label}" in note for note in plan.notes)
    assert is_said == stored.dtype.label.startswith("F6_")
