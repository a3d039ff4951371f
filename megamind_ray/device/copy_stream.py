"""Streams and events, as a copy engine uses them. Not yet run on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CopyStream", "CudaCopyStream", "Event"]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class CopyStream(Protocol):
    """A queue of work for a device. Thread-safe."""

    def queueing(self) -> AbstractContextManager[Any]:
        """Operations of torch in this thread go to the stream."""

    def record(self) -> Event:
        """The point behind all that was queued so far."""

    def follow_current(self) -> None:
        """What is queued from now on runs after the work that the current stream has now."""


class CudaCopyStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def queueing(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def follow_current(self) -> None:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
