from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamind_ray.core.tensor import DType
from megamind_ray.device.dtypes import torch_dtype, torch_layout
from megamind_ray.device.memory import device_budget_bytes, gpu_facts, host_memory
from megamind_ray.errors import CapacityError, RequestError

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def test_without_limits_the_kernel_says_what_is_available(machine: Path) -> None:
    memory = host_memory(proc=machine, cgroup=machine)

    assert (memory.total_bytes, memory.free_bytes) == (16 * GIB, 8 * GIB)


def test_a_control_group_limits_it(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{4 * GIB}\n")
    (machine / "memory.current").write_text(f"{3 * GIB}\n")

    memory = host_memory(proc=machine, cgroup=machine)

    assert (memory.total_bytes, memory.free_bytes) == (4 * GIB, GIB)


def test_a_group_above_the_own_one_limits_it_too(machine: Path) -> None:
    (machine / "self").mkdir()
    (machine / "self" / "cgroup").write_text("0::/jobs/job-7\n")
    (machine / "jobs" / "job-7").mkdir(parents=True)
    (machine / "jobs" / "memory.max").write_text(f"{2 * GIB}\n")
    (machine / "jobs" / "memory.current").write_text(f"{GIB // 2}\n")

    assert host_memory(proc=machine, cgroup=machine).free_bytes == 3 * GIB // 2


def test_a_control_group_without_a_limit_does_not(machine: Path) -> None:
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text(f"{3 * GIB}\n")

    assert host_memory(proc=machine, cgroup=machine).free_bytes == 8 * GIB


def test_a_budget_that_is_asked_for_is_taken_as_it_is() -> None:
    assert device_budget_bytes("cpu", 1 << 20) == 1 << 20


def test_the_default_budget_leaves_a_reserve() -> None:
    assert 0 < device_budget_bytes("cpu") < host_memory().free_bytes + GIB


def test_a_budget_larger_than_the_device_is_refused() -> None:
    with pytest.raises(CapacityError, match="device cpu: a budget of .* does not fit.*lower the budget by") as caught:
        device_budget_bytes("cpu", 1 << 60)
    assert caught.value.needed_bytes == 1 << 60


@pytest.mark.parametrize("device", ["tpu", "cuda:x", ""])
def test_unknown_devices_are_refused_by_name(device: str) -> None:
    with pytest.raises(RequestError, match=f"device '{device}' is not known"):
        device_budget_bytes(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_missing_gpu_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="sees 0 CUDA devices"):
        device_budget_bytes("cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_no_nvidia_driver_means_no_gpu_facts() -> None:
    assert gpu_facts() == ()


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.label.startswith("F6_")])
def test_every_dtype_but_f6_has_one_of_torch_of_its_size(dtype: DType) -> None:
    found = torch_dtype(dtype)

    assert found is not None
    assert found.itemsize * 8 == (8 if dtype is DType.F4 else dtype.bits)


def test_f4_counts_pairs() -> None:
    assert torch_layout("w", DType.F4, (3, 8), raw=False) == (torch.float4_e2m1fn_x2, (3, 4))


def test_f4_with_an_odd_last_dim_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"tensor 'w': F4 with shape \[4, 3\] has an odd last dim"):
        torch_layout("w", DType.F4, (4, 3), raw=False)


def test_f6_is_refused_by_name_unless_its_bytes_will_do() -> None:
    with pytest.raises(RequestError, match="tensor 'w': torch .* has no dtype for F6_E2M3"):
        torch_layout("w", DType.F6_E2M3, (2, 8), raw=False)

    assert torch_layout("w", DType.F6_E2M3, (2, 8), raw=True) == (torch.uint8, (2, 6))
    assert torch_layout("w", DType.F6_E2M3, (4, 3), raw=True) == (torch.uint8, (-1,))
