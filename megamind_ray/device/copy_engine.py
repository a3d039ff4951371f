"""Copies between host and device: one stream in each direction, events instead of waiting, deadlines on every wait.

Copies in one direction share one engine of the hardware, so more streams gain nothing by default (``benchmarks.device``
measures 1, 2 and 12). Not yet run on a GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megamind_ray.device.copy_stream import CopyStream, Event
from megamind_ray.device.host_registry import Held, HostRegistry, Piece
from megamind_ray.device.memory import cuda_memory
from megamind_ray.device.pinned import HostRuntime, pinned_buffer
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.device.waiting import wait_until
from megamind_ray.errors import CapacityError, ClusterError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["CopyEngine", "CopyTicket"]

_DEADLINE_S: Final = 120.0


class CopyTicket:
    """A copy under way. It keeps host memory and registrations until the device has passed its event."""

    def __init__(self, engine: CopyEngine, event: Event, what: str, held: Held, *kept: object) -> None:
        self._engine = engine
        self._event = event
        self._what = what
        self._held = held
        self._kept: tuple[object, ...] = kept
        self._lock = threading.Lock()
        self._finished = False

    def done(self) -> bool:
        """Whether the bytes are in place.

        Raises:
            ClusterError: The device failed.
        """
        with self._lock:
            if not self._finished and self._engine.passed(self._event, self._what):
                self._finished = True
                self._held.release()
                self._kept = ()
            return self._finished

    def wait(self) -> None:
        """Blocks until the bytes are in place.

        Raises:
            ClusterError: The device failed, or did not get there in time; no more copies are queued for it.
        """
        self._engine.wait(self.done, self._what)


class CopyEngine:
    """Streams and host memory for the copies of one device. Thread-safe.

    Args:
        device: Which one.
        open_stream: Makes a stream.
        runtime: Page-locks host memory.
        registry: Page-locks the pool where it is; None: blocks pass the driver's buffers.
        num_streams: Towards the device; taken in turns.
        deadline_s: For each wait.
    """

    def __init__(
        self,
        device: torch.device,
        open_stream: Callable[[], CopyStream],
        runtime: HostRuntime,
        *,
        registry: HostRegistry | None = None,
        num_streams: int = 1,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self.registry = registry
        self._device = device
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._to_device = tuple(open_stream() for _ in range(num_streams))
        self._to_host = open_stream()
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._under_way: deque[CopyTicket] = deque()
        self._abandoned: list[object] = []
        self._lost: str | None = None

    def staging(self, nbytes: int) -> Bytes:
        """Page-locked host memory of this size, as ``pinned_buffer``."""
        return pinned_buffer(nbytes, self._runtime)

    def follow_current(self) -> None:
        """Before the first copy to memory that was just allocated: the allocator may hand out memory that work queued
        earlier on the current stream still writes to.
        """
        for stream in self._to_device:
            stream.follow_current()

    def to_device(self, flat: torch.Tensor, dst: Runs, src: Bytes) -> CopyTicket | None:
        """Copies packed host bytes to runs of device memory.

        Args:
            flat: ``uint8 [n]`` on the device.
            dst: Runs in ``flat``.
            src: As many bytes as the runs have, contiguous. Must stay as it is until the ticket's ``wait`` returns.
                A read-only array is taken for a block of the pool, and page-locked in place where that works.

        Returns:
            None where there is nothing to copy.

        Raises:
            ClusterError: The device failed.
            CapacityError: It has no room for the packed bytes on their way to runs with gaps.
        """
        assert src.nbytes == dst.nbytes, (src.nbytes, dst)
        if not dst.nbytes:
            return None
        stream = self._to_device[next(self._turns) % len(self._to_device)]
        what = f"a copy of {format_bytes(dst.nbytes)} to the device"
        with self._queued(stream, what, lambda: self._hold(src), src) as (held, kept):
            target = _runs(flat, dst) if dst.contiguous else flat.new_empty(dst.nbytes)
            for piece in held.pieces:
                source = _tensor(_readable(src, piece))
                kept.append(source)
                target[piece.begin : piece.end].copy_(source, non_blocking=True)
            if not dst.contiguous:
                # One flat copy over the bus, then the device spreads the runs at its own memory's speed.
                _runs(flat, dst).copy_(target.view(dst.num_runs, dst.run_bytes))
        return self._last(kept)

    def to_host(self, flat: torch.Tensor, src: Runs, dst: Bytes) -> CopyTicket | None:
        """Copies runs of device memory to host memory, packed, after the work that the current stream has now.

        Args:
            flat: ``uint8 [n]`` on the device.
            src: Runs in ``flat``.
            dst: As many bytes as the runs have, contiguous; best of ``staging``. Complete when ``wait`` returns.

        Returns:
            None where there is nothing to copy.

        Raises:
            ClusterError, CapacityError: As for ``to_device``.
        """
        assert dst.nbytes == src.nbytes, (dst.nbytes, src)
        assert dst.flags.writeable
        if not src.nbytes:
            return None
        self._to_host.follow_current()
        what = f"a copy of {format_bytes(src.nbytes)} to the host"
        with self._queued(self._to_host, what, lambda: Held((Piece(0, dst.nbytes),)), dst) as (_, kept):
            packed = _runs(flat, src).reshape(-1)
            _tensor(dst).copy_(packed, non_blocking=True)
            kept.append(packed)  # on this stream the allocator would not reuse it too early; on the caller's it might
        return self._last(kept)

    def fill(self, flat: torch.Tensor, value: int) -> CopyTicket:
        """Writes a byte value all over device memory."""
        what = f"filling {format_bytes(flat.numel())}"
        with self._queued(self._to_device[0], what, lambda: Held(())) as (_, kept):
            flat.fill_(value)
        return self._last(kept)

    def passed(self, event: Event, what: str) -> bool:
        """Whether the device is past an event.

        Raises:
            ClusterError: The device failed.
        """
        try:
            return event.query()
        except RuntimeError as error:
            raise self._lose(what, error) from error

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Waits for the device until the deadline.

        Raises:
            ClusterError: It failed, or did not get there.
        """
        if self._lost is not None and not done():
            self._refuse_when_lost()  # deadlines of many copies would add up
        try:
            wait_until(done, deadline_s=self._deadline_s, what=f"device {self._device}: {what}")
        except ClusterError as error:
            self._lost = self._lost or error.message
            raise

    def _hold(self, src: Bytes) -> Held:
        if self.registry is None or src.flags.writeable:
            return Held((Piece(0, src.nbytes),))
        return self.registry.hold(src)

    @contextmanager
    def _queued(
        self, stream: CopyStream, what: str, hold: Callable[[], Held], *memory: Bytes
    ) -> Iterator[tuple[Held, list[object]]]:
        """Queues what is done inside, and puts its ticket at the end of the list of what is to be kept until then."""
        import torch

        kept: list[object] = list(memory)
        self._refuse_when_lost()
        self._forget_finished()
        held = hold()
        try:
            with stream.queueing():
                yield held, kept
                event = stream.record()
        except torch.OutOfMemoryError as error:
            held.release()  # memory is asked for before anything is queued
            raise self._full(what, sum(data.nbytes for data in memory)) from error
        except BaseException as error:
            # Some of it may be under way, and no event will tell when it ended: its memory is never let go.
            self._abandoned.append((held, kept))
            if isinstance(error, RuntimeError):
                raise self._lose(what, error) from error
            raise
        ticket = CopyTicket(self, event, what, held, *kept)
        kept.append(ticket)
        # A caller that fails between two copies forgets its tickets, while the device goes on reading.
        with self._lock:
            self._under_way.append(ticket)

    def _last(self, kept: Sequence[object]) -> CopyTicket:
        ticket = kept[-1]
        assert isinstance(ticket, CopyTicket)
        return ticket

    def _forget_finished(self) -> None:
        with self._lock:
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()

    def _refuse_when_lost(self) -> None:
        if self._lost is not None:
            raise ClusterError(
                f"device {self._device} failed before ({self._lost}); nothing more is copied to it, start the worker "
                "again"
            )

    def _full(self, what: str, nbytes: int) -> CapacityError:
        free_bytes = cuda_memory(self._device.index).free_bytes
        return CapacityError(
            f"device {self._device}: {what} needs {format_bytes(nbytes)} beside the arena, {format_bytes(free_bytes)} "
            f"are free; lower the device budget by {format_bytes(max(0, nbytes - free_bytes) or nbytes)}",
            where=str(self._device),
            needed_bytes=nbytes,
            free_bytes=free_bytes,
        )

    def _lose(self, what: str, error: RuntimeError) -> ClusterError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._lost = self._lost or reason
        return ClusterError(
            f"device {self._device}: {what} failed: {reason}; see dmesg for Xid messages, start the worker again"
        )


def _readable(src: Bytes, piece: Piece) -> Bytes:
    data: Bytes = src[piece.begin : piece.end]
    return data.copy() if piece.copy_first else data


def _runs(flat: torch.Tensor, runs: Runs) -> torch.Tensor:
    if runs.contiguous:
        return flat[runs.offset : runs.offset + runs.nbytes]
    place = flat.storage_offset() + runs.offset
    return flat.as_strided((runs.num_runs, runs.run_bytes), (runs.stride_bytes, 1), place)


def _tensor(data: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.asarray(_Exported(data)))


class _Exported:
    """An array that torch takes without a warning where it is read-only: then it is only copied from."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface = dict(self._data.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        return interface
