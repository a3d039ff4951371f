"""The copy engines of this process, one per CUDA device."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_stream import CudaCopyStream
from megamind_ray.device.host_registry import HostRegistry
from megamind_ray.device.memory import cuda_memory, host_memory
from megamind_ray.device.pinned import CudaHostRuntime

if TYPE_CHECKING:
    import torch

__all__ = ["copy_engine"]

# Page-locked memory cannot be swapped out. The pool's pages are shared by all workers of a node, and count once.
_REGISTERED_SHARE: Final = 0.5


class _Engines:
    """The engines of this process, one per device, and the registry that they share: memory is registered for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[int, CopyEngine] = {}
        self._registry: HostRegistry | None = None

    def get(self, device: torch.device) -> CopyEngine:
        import torch

        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
        index = current if device.index is None else device.index
        with self._lock:
            if index not in self._engines:
                cuda_memory(index)  # raises where there is none
                whole = torch.device("cuda", index)
                runtime = CudaHostRuntime(whole)
                if self._registry is None:
                    max_bytes = int(host_memory().total_bytes * _REGISTERED_SHARE)
                    self._registry = HostRegistry(runtime, max_bytes=max_bytes)
                streams = partial(CudaCopyStream, whole)
                self._engines[index] = CopyEngine(whole, streams, runtime, registry=self._registry)
            return self._engines[index]


_ENGINES: Final = _Engines()


def copy_engine(device: torch.device) -> CopyEngine:
    """The engine that all of this process uses for a CUDA device.

    Raises:
        RequestError: There is no such device.
    """
    return _ENGINES.get(device)
