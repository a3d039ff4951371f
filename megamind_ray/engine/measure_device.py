"""How fast page-locked host memory gets to each GPU, one at a time, measured. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_stream import CudaCopyStream
from megamind_ray.device.memory import cuda_memory
from megamind_ray.device.pinned import CudaHostRuntime
from megamind_ray.engine.measure_figures import Sampler
from megamind_ray.engine.tune_device import CopyMeter
from megamind_ray.engine.tune_search import Values
from megamind_ray.errors import MegamindError, RequestError
from megamind_ray.units import MIB, format_bytes

__all__ = ["Copies", "measure_devices"]

_COPIED_BYTES: Final = 512 * MIB
# As the engine copies.
_AS_LOADED: Final[Values] = {"streams": 1, "copy_bytes": 8 * MIB}
_CONDITION: Final = "pinned"


class Copies(Protocol):
    """What copies to a device and says how long it took: ``CopyMeter``."""

    def measure(self, values: Values, condition: str, /) -> float:
        """Seconds."""


def _cuda_copies(index: int) -> Copies:
    import torch

    device = torch.device("cuda", index)
    free_bytes = cuda_memory(index).free_bytes
    if free_bytes < 2 * _COPIED_BYTES:
        raise RequestError(f"{device}: only {format_bytes(free_bytes)} are free; end what else runs on it")
    runtime = CudaHostRuntime(device)

    def open_engine(streams: int) -> CopyEngine:
        return CopyEngine(device, partial(CudaCopyStream, device), runtime, num_streams=streams)

    return CopyMeter(device, open_engine, _COPIED_BYTES)


def measure_devices(
    indices: Iterable[int], sampler: Sampler, *, open_copies: Callable[[int], Copies] = _cuda_copies
) -> dict[int, float]:
    """Measures copies to GPUs.

    Args:
        indices: Which, as CUDA counts.
        sampler: Takes the figures; a GPU that others fill, or that fails, is told in its notes.
        open_copies: Makes what copies to one of them.

    Returns:
        Bytes per second of those that were measured.

    Raises:
        ClusterError: It was stopped.
    """
    found: dict[int, float] = {}
    for index in indices:
        try:
            copies = open_copies(index)
            copies.measure(_AS_LOADED, _CONDITION)  # the first one takes the driver's resources
            rate = sampler.take(f"host to cuda:{index}", "bytes/s", partial(_rate, copies))
        except MegamindError as error:
            sampler.raise_if_stopped()
            sampler.notes.append(f"host to cuda:{index}: not measured: {error.message}")
            continue
        if rate is not None:
            found[index] = rate
    return found


def _rate(copies: Copies) -> float:
    return _COPIED_BYTES / max(1e-9, copies.measure(_AS_LOADED, _CONDITION))
