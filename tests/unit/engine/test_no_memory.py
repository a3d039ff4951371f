"""A load that this process has no memory for ends with an error that says so, and not with the system's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import megamind_ray as mm
from megamind_ray.device import arena
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.empty import empty_tensor

MORE_THAN_THERE_IS = 1 << 60


def test_a_buffer_that_cannot_be_mapped_is_a_capacity_error() -> None:
    with pytest.raises(mm.CapacityError, match=r"host memory: .* cannot be mapped .*ulimit -v") as caught:
        host_buffer(MORE_THAN_THERE_IS)

    assert caught.value.needed_bytes == MORE_THAN_THERE_IS


def test_a_tensor_that_cannot_be_allocated_is_a_capacity_error() -> None:
    with pytest.raises(mm.CapacityError, match="cpu: a tensor of .* does not fit") as caught:
        empty_tensor((2, MORE_THAN_THERE_IS // 8), torch.float32, torch.device("cpu"))

    assert caught.value.needed_bytes == MORE_THAN_THERE_IS


def test_other_errors_of_torch_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        empty_tensor((-1,), torch.float32, torch.device("cpu"))


def test_a_load_without_memory_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")

    def refuse(_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena, "_map_anonymous", refuse)

    with pytest.raises(mm.CapacityError, match="host memory"):
        mm.load_file(tmp_path / "model.safetensors")


def test_a_meta_module_without_memory_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    module = nn.Linear(4, 4, device="meta")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    monkeypatch.setattr(torch, "empty", refuse)

    with pytest.raises(mm.CapacityError, match="does not fit"):
        mm.load_into(module, tmp_path / "model.safetensors")

    assert module.weight.is_meta
    assert module.bias.is_meta
