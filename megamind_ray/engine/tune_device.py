"""How copies to a GPU are fastest: how many streams, and how large each copy. Not yet run on a GPU.

The engine has no settings for either (one stream, copies as large as chunks): what is found is shown, not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_stream import CudaCopyStream
from megamind_ray.device.memory import cuda_memory, gpu_facts
from megamind_ray.device.pinned import CudaHostRuntime
from megamind_ray.device.strided import Runs
from megamind_ray.engine.tune_search import Clock, Knob, Search, Values, search
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.units import MIB

if TYPE_CHECKING:
    import torch

__all__ = ["CopyMeter", "CopyTuning", "tune_copies"]

_COPIED_BYTES: Final = 512 * MIB
_CONDITION: Final = "pinned"
_START: Final[Values] = {"streams": 1, "copy_bytes": 8 * MIB}
_KNOBS: Final = (
    Knob("copy_bytes", tuple(size * MIB for size in (16, 4, 32, 64, 8))),
    Knob("streams", (2, 4, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTuning:
    """What was found for one GPU.

    Attributes:
        device: Its name.
        found: Streams and bytes of a copy, against the engine's own.
    """

    device: str
    found: Search


class CopyMeter:
    """Copies page-locked host memory to a device, and says how long it took.

    Args:
        device: Which one.
        open_engine: Makes an engine with so many streams.
        num_bytes: Of one measurement.

    Raises:
        RequestError: There is no room for that many bytes.
        ClusterError: The device failed.
    """

    def __init__(self, device: torch.device, open_engine: Callable[[int], CopyEngine], num_bytes: int) -> None:
        import torch

        self._open_engine = open_engine
        self._engines: dict[int, CopyEngine] = {}
        self._device = device
        with _torch_errors(device):
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._source = self._engine(1).staging(num_bytes)
        self._source[:] = 1

    def measure(self, values: Values, _condition: str) -> float:
        """Seconds until all bytes are there.

        Raises:
            ClusterError: The device failed.
            RequestError: A copy would be larger than what is copied in all.
        """
        streams, copy_bytes, num_bytes = int(str(values["streams"])), int(str(values["copy_bytes"])), len(self._source)
        if copy_bytes * streams > num_bytes:
            raise RequestError(f"{streams} copies of {copy_bytes} bytes are more than the {num_bytes} that are copied")
        with _torch_errors(self._device):
            engine = self._engine(streams)
            begin_s = time.perf_counter()
            tickets = []
            for begin in range(0, num_bytes, copy_bytes):
                size = min(copy_bytes, num_bytes - begin)
                runs = Runs(begin, size, 1, size)
                tickets.append(engine.to_device(self._flat, runs, self._source[begin : begin + size]))
            for ticket in tickets:
                if ticket is not None:
                    ticket.wait()
            return time.perf_counter() - begin_s

    def _engine(self, streams: int) -> CopyEngine:
        if streams not in self._engines:
            engine = self._engines[streams] = self._open_engine(streams)
            engine.follow_current()
        return self._engines[streams]


@contextmanager
def _torch_errors(device: torch.device) -> Iterator[None]:
    """Says what torch raises as an error of ours: whoever measures a disk besides can go on."""
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in reason:
            raise RequestError(f"{device}: no room to measure copies ({reason}); end what else runs on it") from error
        raise ClusterError(f"{device}: copies cannot be measured ({reason}); look at it with nvidia-smi") from error


def tune_copies(*, deadline_s: float, clock: Clock, on_trial: Callable[[Knob, object], None]) -> CopyTuning | None:
    """Measures copies to the first GPU; None where there is none.

    Raises:
        RequestError: Torch cannot use it, or it has no memory free to copy to.
        ClusterError: It failed.
    """
    facts = gpu_facts()
    if not facts:
        return None
    import torch

    device = torch.device("cuda", 0)
    with _torch_errors(device):
        free_bytes = cuda_memory(0).free_bytes
    if free_bytes < 2 * _COPIED_BYTES:
        raise RequestError(f"{device}: only {free_bytes} bytes are free; end what else runs on it")
    with _torch_errors(device):
        runtime = CudaHostRuntime(device)

    def open_engine(streams: int) -> CopyEngine:
        return CopyEngine(device, partial(CudaCopyStream, device), runtime, num_streams=streams)

    meter = CopyMeter(device, open_engine, _COPIED_BYTES)
    meter.measure(_START, _CONDITION)  # the first one takes the driver's resources
    found = search(_KNOBS, _START, (_CONDITION,), meter.measure, deadline_s=deadline_s, clock=clock, on_trial=on_trial)
    return CopyTuning(device=facts[0].name, found=found)
