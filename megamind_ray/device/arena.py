"""Arenas: the memory of a rank, of a fixed budget, handed out in allocations. Weights are views of it."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from megamind_ray.core.program import View
from megamind_ray.device.dtypes import torch_layout
from megamind_ray.device.holes import HoleList
from megamind_ray.device.lease import Lease, LeaseBook
from megamind_ray.device.memory import host_memory
from megamind_ray.device.strided import Bytes, Runs, copy_runs
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.pools import submit
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["POISON", "Allocation", "Arena", "ArenaLedger", "HostArena", "LedgerArena", "WriteTicket", "host_buffer"]

POISON: Final = 0xA5
_PAGE_BYTES: Final = mmap.PAGESIZE
_HUGE_PAGE_BYTES: Final = 2 << 20
_MANY_HUGE_PAGES: Final = 16  # one more is little beside them
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module names it from Python 3.13 on


@dataclass(frozen=True, slots=True)
class Allocation:
    """A range of an arena.

    Attributes:
        offset: First byte in the arena.
        nbytes: Size.
        epoch: Unique in the arena; a range that is given back and taken again has another one.
    """

    offset: int
    nbytes: int
    epoch: int


class WriteTicket(Protocol):
    """A write under way; its source must stay as it is until ``wait`` returns."""

    def wait(self) -> None:
        """Blocks until the bytes are in place."""


class Arena(Protocol):
    """Device memory of a fixed budget. All methods are thread-safe; writes of disjoint ranges run side by side."""

    @property
    def device(self) -> str:
        """As torch names it: ``cpu``, ``cuda:0``."""

    @property
    def budget_bytes(self) -> int:
        """Size."""

    @property
    def free_bytes(self) -> int:
        """Bytes in no allocation."""

    def allocate(self, nbytes: int, alignment: int = 256) -> Allocation:
        """Takes a range.

        Raises:
            CapacityError: No hole is large enough.
        """

    def free(self, allocation: Allocation, deadline_s: float = 0.0) -> None:
        """Gives a range back, once no lease on it is out.

        Raises:
            RequestError: Leases are out after the deadline (the allocation stays), or it was given back before.
        """

    def free_when_unused(self, allocation: Allocation) -> None:
        """Gives a range back as soon as all its leases were returned, without anybody asking again."""

    def lease(self, allocation: Allocation) -> Lease:
        """Keeps ``free`` from giving the range to somebody else."""

    def host_bytes(self, allocation: Allocation) -> Bytes | None:
        """The range as an array to read into or look at, where the host can; the caller holds a lease."""

    def leased_bytes(self, allocation: Allocation) -> Bytes | None:
        """As ``host_bytes``; the array and all views of it hold a lease as long as one of them lives."""

    def staging(self, nbytes: int) -> Bytes:
        """Host memory that copies to this arena start from fastest."""

    def write(self, allocation: Allocation, dst: Runs, src: Bytes) -> WriteTicket | None:
        """Copies packed bytes to runs of an allocation.

        Args:
            allocation: Where.
            dst: Runs, counted from the start of the allocation.
            src: As many bytes as the runs have, contiguous.

        Returns:
            None where the bytes are in place, else a ticket.
        """

    def checksum(self, allocation: Allocation, offset: int, nbytes: int) -> int | None:
        """CRC-32 of bytes in place, or None where the host cannot see them."""

    def tensor(self, allocation: Allocation, view: View) -> torch.Tensor:
        """A view as a tensor with a storage of its own, which holds a lease as long as it lives.

        Dtypes that torch lacks come as packed ``uint8`` (see ``torch_layout``).
        """


class ArenaLedger:
    """What arenas share: ranges, epochs, leases. Thread-safe.

    Args:
        where: The arena in words, for messages.
        budget_bytes: Its size.
        make_room: What its user can do for room, for messages.
    """

    def __init__(self, where: str, budget_bytes: int, make_room: str = "use more ranks, unload another model") -> None:
        self.where = where
        self._make_room = make_room
        self.budget_bytes = budget_bytes
        self.leases = LeaseBook()
        self._holes = HoleList(budget_bytes)
        self._epochs = itertools.count(1)
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._expiring: dict[int, Allocation] = {}

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._holes.free_bytes

    def allocate(self, nbytes: int, alignment: int) -> Allocation:
        assert nbytes >= 0, nbytes
        assert 0 < alignment <= _PAGE_BYTES, alignment
        with self._lock:
            offset = self._holes.take(nbytes, alignment)
            if offset is None:
                raise self._full(nbytes)
            allocation = Allocation(offset, nbytes, next(self._epochs))
        self.leases.open(allocation.epoch)
        return allocation

    def free(self, allocation: Allocation, deadline_s: float, wipe: Callable[[Allocation], None]) -> None:
        """Ends the epoch, has the bytes wiped while nobody else can get them, then gives the range back."""
        self.leases.close(allocation.epoch, deadline_s, allocation.nbytes)
        self._give_back(allocation, wipe)

    def free_when_unused(self, allocation: Allocation) -> None:
        """Has the range given back by a ``sweep`` after its last lease was returned."""
        with self._lock:
            self._expiring[allocation.epoch] = allocation
        try:
            self.leases.expire(allocation.epoch)
        except RequestError:
            with self._lock:
                del self._expiring[allocation.epoch]
            raise

    def sweep(self, wipe: Callable[[Allocation], None]) -> None:
        """Gives back what nobody uses any more; who comes while another thread does, finds it done."""
        with self._sweeping:
            for epoch in self.leases.take_expired():
                with self._lock:
                    allocation = self._expiring.pop(epoch)
                self._give_back(allocation, wipe)

    def _give_back(self, allocation: Allocation, wipe: Callable[[Allocation], None]) -> None:
        try:
            wipe(allocation)
        finally:
            with self._lock:
                self._holes.give(allocation.offset, allocation.offset + allocation.nbytes)

    def _full(self, nbytes: int) -> CapacityError:
        free, largest = self._holes.free_bytes, self._holes.largest_bytes
        if free >= nbytes:
            remedy = f"it is fragmented; {self._make_room}, or load again into an empty arena"
        else:
            missing = format_bytes(nbytes - free)
            remedy = f"{missing} are missing; {self._make_room}, or raise the budget by as much"
        return CapacityError(
            f"{self.where}: {format_bytes(nbytes)} do not fit: {format_bytes(free)} of "
            f"{format_bytes(self.budget_bytes)} are free, the largest hole has {format_bytes(largest)}; {remedy}",
            where=self.where,
            needed_bytes=nbytes,
            free_bytes=free,
        )


class LedgerArena(ABC):
    """What arenas share beside the memory itself.

    Args:
        ledger: Of the arena's ranges.
    """

    def __init__(self, ledger: ArenaLedger) -> None:
        self._ledger = ledger

    @property
    @abstractmethod
    def device(self) -> str:
        """As ``Arena.device``."""

    @property
    def budget_bytes(self) -> int:
        return self._ledger.budget_bytes

    @property
    def free_bytes(self) -> int:
        self._ledger.sweep(self._wipe)
        return self._ledger.free_bytes

    def allocate(self, nbytes: int, alignment: int = 256) -> Allocation:
        self._ledger.sweep(self._wipe)
        try:
            return self._ledger.allocate(nbytes, alignment)
        except CapacityError:
            gc.collect()  # tensors may be held by nothing but a cycle of garbage
            self._ledger.sweep(self._wipe)
            return self._ledger.allocate(nbytes, alignment)

    def leased_bytes(self, allocation: Allocation) -> Bytes | None:
        data = self.host_bytes(allocation)
        return None if data is None else np.asarray(_LeasedBytes(data, self.lease(allocation)))

    @abstractmethod
    def host_bytes(self, allocation: Allocation) -> Bytes | None:
        """As ``Arena.host_bytes``."""

    def free(self, allocation: Allocation, deadline_s: float = 0.0) -> None:
        self._ledger.free(allocation, deadline_s, self._wipe)

    def free_when_unused(self, allocation: Allocation) -> None:
        self._ledger.free_when_unused(allocation)

    def lease(self, allocation: Allocation) -> Lease:
        return self._ledger.leases.lease(allocation.epoch)

    def tensor(self, allocation: Allocation, view: View) -> torch.Tensor:
        import torch

        dtype, shape = torch_layout(view.name, view.dtype, view.shape, raw=True)
        assert view.offset + view.nbytes <= allocation.nbytes, view
        lease = self.lease(allocation)
        if not view.nbytes:
            lease.close()
            return torch.empty(shape, dtype=dtype, device=self.device)
        begin = allocation.offset + view.offset
        return self._leased(begin, begin + view.nbytes, lease).view(dtype).view(shape)

    @abstractmethod
    def _leased(self, begin: int, end: int, lease: Lease) -> torch.Tensor:
        """Bytes ``[begin, end)`` of the arena as ``uint8``, in a storage that keeps the lease."""

    @abstractmethod
    def _wipe(self, allocation: Allocation) -> None:
        """Poisons the bytes, or gives their pages to the system; nobody else can get them meanwhile."""


class HostArena(LedgerArena):
    """An arena in host memory: one private mapping, its pages taken when first written to.

    Args:
        budget_bytes: Size.
        poison: Test mode: freed memory is filled with ``POISON`` instead of given to the system, so that a tensor
            that outlived its lease shows.
        keep_pages: Keep freed memory for the next allocation instead of giving its pages to the system: the first
            touch of a page costs more than reading its bytes does.
        where: Name for messages.
        make_room: What its user can do for room, for messages.

    Raises:
        CapacityError: This process may not map so much.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        poison: bool = False,
        keep_pages: bool = False,
        where: str = "host arena",
        make_room: str | None = None,
    ) -> None:
        ledger = ArenaLedger(where, budget_bytes, make_room) if make_room else ArenaLedger(where, budget_bytes)
        super().__init__(ledger)
        try:
            self._mapping = _map_anonymous(budget_bytes)
        except OSError as error:
            raise CapacityError(
                f"{where}: {format_bytes(budget_bytes)} cannot be mapped ({error.strerror}); lower the budget, or "
                "raise the limits of this process (ulimit -v)",
                where=where,
                needed_bytes=budget_bytes,
                free_bytes=host_memory().free_bytes,
            ) from error
        self._bytes: Bytes = np.frombuffer(self._mapping, dtype=np.uint8, count=budget_bytes)
        self._poison = poison
        self._keep_pages = keep_pages

    @property
    def device(self) -> str:
        return "cpu"

    def prefault(self, num_threads: int) -> None:
        """Takes all pages now, side by side, so that no load has to wait for them."""
        share_bytes = -(-self.budget_bytes // (num_threads * _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES
        shares = [
            (begin, min(begin + share_bytes, self.budget_bytes)) for begin in range(0, self.budget_bytes, share_bytes)
        ]
        with ThreadPoolExecutor(num_threads, thread_name_prefix="prefault") as pool:
            for taken in [submit(pool, self._take_pages, share) for share in shares]:
                taken.result()

    def _take_pages(self, share: tuple[int, int]) -> None:
        begin, end = share
        data = self._bytes[begin:end]
        # By the C library, as Python's own call keeps the GIL for all of it.
        if not _libc().madvise(data.ctypes.data, data.nbytes, _MADV_POPULATE_WRITE):
            return
        error = ctypes.get_errno()
        if error != errno.EINVAL:
            raise CapacityError(
                f"{self._ledger.where}: {format_bytes(self.budget_bytes)} of memory could not be taken "
                f"({os.strerror(error)}); lower the budget, or end what else runs",
                where=self._ledger.where,
                needed_bytes=self.budget_bytes,
                free_bytes=host_memory().free_bytes,
            )
        data[::_PAGE_BYTES] = 0  # before Linux 5.14; called while nobody has an allocation, so any value will do

    def host_bytes(self, allocation: Allocation) -> Bytes:
        return self._bytes[allocation.offset : allocation.offset + allocation.nbytes]

    def staging(self, nbytes: int) -> Bytes:
        return host_buffer(nbytes)

    def write(self, allocation: Allocation, dst: Runs, src: Bytes) -> None:
        copy_runs(src, dst.packed(), self.host_bytes(allocation), dst)

    def checksum(self, allocation: Allocation, offset: int, nbytes: int) -> int:
        return crc32(self.host_bytes(allocation)[offset : offset + nbytes])

    def _leased(self, begin: int, end: int, lease: Lease) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.asarray(_LeasedBytes(self._bytes[begin:end], lease)))

    def _wipe(self, allocation: Allocation) -> None:
        begin, end = allocation.offset, allocation.offset + allocation.nbytes
        if self._poison:
            self._bytes[begin:end] = POISON
        if self._poison or self._keep_pages:
            return
        # Whole pages only: the first and the last may hold bytes of a neighbour.
        begin, end = -(-begin // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
        if begin < end:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class _LeasedBytes:
    """Exports bytes to numpy; whoever uses them (a torch storage at last) keeps this object, and it the lease."""

    def __init__(self, data: Bytes, lease: Lease) -> None:
        self.data = data
        self.lease = lease

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def host_buffer(nbytes: int) -> Bytes:
    """A fresh page-aligned buffer, which takes its pages when first written to.

    Raises:
        CapacityError: This process may not have as much memory.
    """
    try:
        mapping = _map_anonymous(nbytes)
    except OSError as error:
        raise CapacityError(
            f"host memory: {format_bytes(nbytes)} cannot be mapped ({error.strerror}); load less at a time, or raise "
            "the limits of this process (ulimit -v)",
            where="host memory",
            needed_bytes=nbytes,
            free_bytes=host_memory().free_bytes,
        ) from error
    return np.frombuffer(mapping, dtype=np.uint8, count=nbytes)


def _map_anonymous(nbytes: int) -> mmap.mmap:
    """Private memory of at least ``nbytes``, page-aligned, zero, not yet backed.

    Huge pages are asked for: the first touch of fresh memory is what limits a load from the page cache (1.8 GB/s with
    4 KiB pages, 4.0 GB/s with huge ones, measured on the reference machine). Linux puts whole huge pages at an address
    of theirs; other sizes begin and end with up to 511 small ones, each a fault of its own.
    """
    if nbytes >= _MANY_HUGE_PAGES * _HUGE_PAGE_BYTES:
        nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    mapping = mmap.mmap(
        -1,
        max(nbytes, 1),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _HUGE_PAGE_BYTES:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
