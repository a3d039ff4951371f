"""How much memory a device has for weights, what NVML tells about GPUs, and how many processors there are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.units import format_bytes

__all__ = ["DeviceMemory", "GpuFacts", "cuda_memory", "device_budget_bytes", "gpu_facts", "host_memory", "usable_cores"]

_CGROUP_LIMITS = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)
# What the driver, the context and the engine's own buffers need beside weights.
_CUDA_RESERVE_SHARE = 0.08
_HOST_RESERVE_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, or of the host as far as this process may use it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What NVML knows of a GPU.

    Attributes:
        index: NVML's number; CUDA counts otherwise where ``CUDA_VISIBLE_DEVICES`` is set.
        uuid: The same in every process.
        name: Product name.
        memory: Total and free.
        pcie_bytes_per_s: Host to device at the widest link, before protocol losses; None where NVML does not say.
    """

    index: int
    uuid: str
    name: str
    memory: DeviceMemory
    pcie_bytes_per_s: float | None


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> DeviceMemory:
    """Host memory: what the kernel calls available, within the limits of the control group.

    Args:
        proc: Where procfs is.
        cgroup: Where control groups are mounted.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for group in (cgroup, *_groups_of_process(proc, cgroup)):
        for limit_name, used_name in _CGROUP_LIMITS:
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                total, free = min(total, limit), min(free, max(0, limit - used))
    return DeviceMemory(total, free)


def _groups_of_process(proc: Path, cgroup: Path) -> list[Path]:
    """The control group (version 2) of this process and all above it; each of them limits it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    own = [cgroup / path for path in paths if path and ".." not in path.split("/")]
    return [group for path in own for group in (path, *path.parents) if group.is_relative_to(cgroup)]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cuda_memory(index: int) -> DeviceMemory:
    """Memory of a CUDA device of this process.

    Raises:
        RequestError: There is no such device.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RequestError(
            f"device cuda:{index}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "use device='cpu'"
        )
    free, total = torch.cuda.mem_get_info(index)
    return DeviceMemory(total, free)


def device_budget_bytes(device: str, requested_bytes: int | None = None) -> int:
    """The size of an arena: what was asked for if it fits, else what is free less a reserve.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        requested_bytes: As the user set it, or None.

    Raises:
        CapacityError: More is asked for than is free.
        RequestError: The device is not known.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        memory, reserve = host_memory(), _HOST_RESERVE_SHARE
    elif kind == "cuda" and (not index or index.isdigit()):
        memory, reserve = cuda_memory(int(index or 0)), _CUDA_RESERVE_SHARE
    else:
        raise RequestError(f"device {device!r} is not known; take 'cpu', 'cuda' or 'cuda:N'")
    if requested_bytes is None:
        return max(0, memory.free_bytes - int(memory.total_bytes * reserve))
    if requested_bytes > memory.free_bytes:
        raise CapacityError(
            f"device {device}: a budget of {format_bytes(requested_bytes)} does not fit, "
            f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} are free; "
            f"lower the budget by {format_bytes(requested_bytes - memory.free_bytes)}",
            where=device,
            needed_bytes=requested_bytes,
            free_bytes=memory.free_bytes,
        )
    return requested_bytes


def gpu_facts() -> tuple[GpuFacts, ...]:
    """The GPUs that NVML sees; none where the machine has no NVIDIA driver, which is a normal case."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION):
            return ()
        raise
    try:
        return tuple(_facts(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


# Bytes per second and lane, by PCIe generation.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def _facts(index: int) -> GpuFacts:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        pcie = _LANE_BYTES_PER_S.get(generation, 0.0) * lanes or None
    except pynvml.NVMLError_NotSupported:
        pcie = None
    return GpuFacts(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory=DeviceMemory(int(memory.total), int(memory.free)),
        pcie_bytes_per_s=pcie,
    )


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that this process may run on, within the quota of its control group.

    Args:
        cpu_max: Quota and period in microseconds, as version 2 of control groups writes them.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no quota, or none that we can read
        return cores
