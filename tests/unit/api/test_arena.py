"""``mm.Arena``: memory that loads use again, and never under somebody's hands."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as reference_load_file
from safetensors.torch import save_file

import megamind_ray as mm
from megamind_ray.api.arena import memory_of
from megamind_ray.device.arena import POISON
from megamind_ray.io import default_sidecar_path, record_checksums, write_sidecar
from megamind_ray.units import KIB, MIB


def checkpoint(path: Path, seed: int, *, rows: int = 300) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer.{number}": torch.randn(rows, 33, generator=generator) for number in range(5)}
    save_file(weights | {"scalar": torch.tensor(float(seed)), "empty": torch.empty(0, 4)}, path)
    return path


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "one.safetensors", 1)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "two.safetensors", 2)


def addresses(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors.values()]


def test_a_later_load_gets_the_memory_of_tensors_that_are_gone(one: Path, two: Path) -> None:
    arena = mm.Arena(MIB)
    first = mm.load_file(one, arena=arena)
    places = addresses(first)
    del first

    second = mm.load_file(two, arena=arena)

    assert addresses(second) == places
    expected = reference_load_file(two)
    assert all(torch.equal(second[name], expected[name]) for name in expected)


def test_memory_that_is_held_is_not_given_to_a_later_load(one: Path, two: Path) -> None:
    arena = mm.Arena(MIB)
    first = mm.load_state_dict(one, arena=arena)
    kept = first["layer.0"][5:7]
    expected = kept.clone()
    del first

    second = mm.load_state_dict(two, arena=arena)

    assert torch.equal(kept, expected)
    assert not set(addresses(second)) & {kept.data_ptr()}


def test_a_load_without_room_says_how_much_is_missing_and_leaves_nothing_behind(one: Path) -> None:
    arena = mm.Arena(300 * KIB)
    first = mm.load_file(one, arena=arena)
    free_bytes = arena.free_bytes

    with pytest.raises(mm.CapacityError, match="do not fit") as caught:
        mm.load_file(one, arena=arena)

    assert caught.value.free_bytes == free_bytes == arena.free_bytes
    del first
    gc.collect()
    assert arena.free_bytes == arena.budget_bytes


def test_a_load_that_fails_gives_its_memory_back(one: Path) -> None:
    arena = mm.Arena(MIB)
    manifest = mm.inspect(one)
    write_sidecar(record_checksums(manifest), default_sidecar_path(manifest))
    with one.open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"wrong")

    with pytest.raises(mm.IntegrityError):
        mm.load_file(one, arena=arena)

    assert arena.free_bytes == arena.budget_bytes


def test_each_tensor_has_a_storage_of_its_own(one: Path) -> None:
    tensors = mm.load_file(one, arena=mm.Arena(MIB))

    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())


def test_tensors_keep_the_arena_alive(one: Path) -> None:
    arena = mm.Arena(MIB)
    memory = weakref.ref(memory_of(arena))
    tensors = mm.load_file(one, arena=arena)
    del arena
    gc.collect()

    expected = reference_load_file(one)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    del tensors
    gc.collect()
    assert memory() is None


def test_poison_shows_a_pointer_that_outlived_its_tensor(one: Path) -> None:
    arena = mm.Arena(MIB, poison=True)
    tensors = mm.load_file(one, arena=arena)
    stale = np.asarray(memoryview(memory_of(arena)._bytes))[: 16 * KIB]  # type: ignore[attr-defined]
    assert (stale != POISON).any()
    del tensors

    assert arena.free_bytes == arena.budget_bytes
    assert (stale[:4000] == POISON).all()


def test_loads_side_by_side_share_an_arena(one: Path, two: Path) -> None:
    arena = mm.Arena(2 * MIB)
    expected = {path: reference_load_file(path) for path in (one, two)}

    def load(number: int) -> bool:
        path = (one, two)[number % 2]
        tensors = mm.load_state_dict(path, arena=arena)
        return all(torch.equal(tensors[name], expected[path][name]) for name in expected[path])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(40)))
    gc.collect()
    assert arena.free_bytes == arena.budget_bytes


def test_what_was_dropped_comes_back_once_whoever_asks(one: Path) -> None:
    """Many threads ask for room just after a model was dropped; each range is given back by one of them."""
    arena = mm.Arena(MIB)
    for _ in range(50):
        tensors = [mm.load_file(one, arena=arena) for _ in range(3)]
        del tensors
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: arena.free_bytes, range(8))) == {arena.budget_bytes}


def test_memory_is_given_back_once() -> None:
    memory = memory_of(mm.Arena(MIB))
    allocation = memory.allocate(KIB)
    memory.free(allocation)

    with pytest.raises(mm.RequestError, match="give it back once"):
        memory.free_when_unused(allocation)
    assert memory.free_bytes == MIB


def test_a_numbered_cpu_is_the_cpu(one: Path) -> None:
    arena = mm.Arena(MIB, "cpu:0")

    assert arena.device == "cpu"
    assert mm.load_file(one, "cpu:0", arena=arena)


@pytest.mark.parametrize("budget", ["nonsense", 0, -1, True])
def test_a_budget_that_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(mm.RequestError, match="budget of the arena"):
        mm.Arena(budget)


def test_a_budget_beyond_the_machine_is_refused() -> None:
    with pytest.raises(mm.CapacityError, match="does not fit"):
        mm.Arena("900TiB")


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:77"])
def test_a_device_that_cannot_be_used_is_refused(device: str) -> None:
    with pytest.raises(mm.RequestError, match="device"):
        mm.Arena(MIB, device)


def test_another_device_than_the_arenas_is_refused(one: Path) -> None:
    arena = mm.Arena(MIB)

    assert mm.load_file(one, "cpu", arena=arena)
    with pytest.raises(mm.RequestError, match="cannot be used|the arena is on cpu"):
        mm.load_file(one, "cuda", arena=arena)


def test_it_says_what_it_is() -> None:
    assert repr(mm.Arena(MIB)) == "Arena(1.00 MiB on cpu, 1.00 MiB free)"
