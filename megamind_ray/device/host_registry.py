"""Shared memory of the pool, page-locked where it is, so that a device reads blocks without a copy in between.

Ray maps its object store once in each worker, and blocks come and go in it. What is registered is therefore not a
block but a **granule**: a piece of the mapping on a fixed grid of addresses, which stays registered for the blocks that
lie there later. Two rules of CUDA follow from that: a copy must lie in one registration, or outside of all of them. So
every source in shared memory is handed out in pieces that end at the borders of granules, registered or not.

Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from megamind_ray.device.mappings import SharedMapping, shared_mapping
from megamind_ray.device.pinned import ALREADY_REGISTERED, LOCK_REMEDY, NOT_SUPPORTED, HostRuntime
from megamind_ray.device.strided import Bytes
from megamind_ray.units import MIB, format_bytes

__all__ = ["Held", "HostRegistry", "Piece"]

_GRANULE_BYTES: Final = 16 * MIB
_KNOWN_ARRAYS: Final = 64
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a source that one copy may take.

    Attributes:
        begin: First byte, counted from the start of the source.
        end: One past the last.
        copy_first: Somebody else registered some of these pages, we cannot know which: read them on the host.
    """

    begin: int
    end: int
    copy_first: bool = False


class Held:
    """Pieces of a source whose registrations stay until ``release``."""

    def __init__(self, pieces: tuple[Piece, ...], release: Callable[[], None] | None = None) -> None:
        self.pieces = pieces
        self._release = release

    def release(self) -> None:
        """The device has read them; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(slots=True)
class _Granule:
    """Registered memory ``[begin, end)`` of a mapping."""

    begin: int
    end: int
    file: tuple[str, int]
    shift: int
    num_users: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def covers(self, mapping: SharedMapping, begin: int, end: int) -> bool:
        """Whether it holds these addresses, and they still mean the same pages of the same file."""
        same = self.file == mapping.file and self.shift == mapping.shift
        return same and self.begin <= begin and end <= self.end


@dataclass(slots=True)
class RegistryCounts:
    """What happened so far, in bytes of sources but for the first.

    Attributes:
        registered_bytes: Registered now.
        in_place_bytes: Handed out from registered memory.
        staged_bytes: Handed out from memory that the driver has to stage.
    """

    registered_bytes: int = 0
    in_place_bytes: int = 0
    staged_bytes: int = 0


@dataclass(slots=True)
class _Refusals:
    """Where registering failed, so that it is not tried again."""

    files: set[tuple[str, int]] = field(default_factory=set)
    granules: set[int] = field(default_factory=set)
    read_only: bool = False


class HostRegistry:
    """Registrations of shared memory, least recently used first out. Thread-safe.

    Args:
        runtime: Registers memory.
        max_bytes: How much may be registered at a time.
        granule_bytes: Size of the grid; a multiple of the page size.
        find: Tells the mapping of an address range.
    """

    def __init__(
        self,
        runtime: HostRuntime,
        *,
        max_bytes: int,
        granule_bytes: int = _GRANULE_BYTES,
        find: Callable[[int, int], SharedMapping | None] = shared_mapping,
    ) -> None:
        self.counts = RegistryCounts()
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._granule_bytes = granule_bytes
        self._find = find
        self._lock = threading.Lock()
        self._granules: OrderedDict[int, _Granule] = OrderedDict()
        self._refused = _Refusals()
        self._passing: Counter[int] = Counter()  # copies under way from slots that were not registered
        self._known: OrderedDict[int, tuple[weakref.ref[Any], SharedMapping | None]] = OrderedDict()

    def hold(self, view: Bytes) -> Held:
        """Cuts a source into pieces, registers them where that works, and keeps them registered.

        The caller keeps ``view`` until it releases what it got: only while the view lives, its addresses mean the same
        memory.

        Args:
            view: Contiguous bytes, in shared memory or not.
        """
        begin = view.ctypes.data
        end = begin + view.nbytes
        with self._lock:
            mapping = self._mapping_of(view) if view.nbytes else None
            if mapping is None:
                return Held((Piece(0, view.nbytes),))
            pieces, used, passing = [], [], []
            for slot in range(begin // self._granule_bytes, -(-end // self._granule_bytes)):
                low = max(begin, slot * self._granule_bytes)
                high = min(end, (slot + 1) * self._granule_bytes)
                granule = self._granule(slot, mapping, low, high)
                if granule is not None:
                    granule.num_users += 1
                    used.append(granule)
                    self.counts.in_place_bytes += high - low
                else:
                    self._passing[slot] += 1
                    passing.append(slot)
                    self.counts.staged_bytes += high - low
                pieces.append(Piece(low - begin, high - begin, granule is None and self._foreign(slot, low, high)))
        return Held(tuple(pieces), lambda: self._give_back(used, passing))

    def close(self) -> None:
        """Takes all registrations back that nobody uses."""
        with self._lock:
            for slot in [slot for slot, granule in self._granules.items() if not granule.num_users]:
                self._drop(slot)

    def _give_back(self, used: list[_Granule], passing: list[int]) -> None:
        with self._lock:
            for granule in used:
                granule.num_users -= 1
            self._passing.subtract(passing)

    def _mapping_of(self, view: Bytes) -> SharedMapping | None:
        """The mapping of the array that ``view`` is part of; asked once for each such array, while it lives."""
        root: Any = view
        while isinstance(root.base, np.ndarray):
            root = root.base
        known = self._known.get(id(root))
        if known is not None and known[0]() is root:
            mapping = known[1]
        else:
            mapping = self._find(root.ctypes.data, root.ctypes.data + max(root.nbytes, 1))
            self._known[id(root)] = (weakref.ref(root), mapping)
            if len(self._known) > _KNOWN_ARRAYS:
                self._known.popitem(last=False)
        inside = mapping is not None and mapping.begin <= view.ctypes.data
        return mapping if inside and mapping and view.ctypes.data + view.nbytes <= mapping.end else None

    def _foreign(self, slot: int, low: int, high: int) -> bool:
        """Whether some of these pages may be part of a registration that does not hold them all."""
        granule = self._granules.get(slot)
        return slot in self._refused.granules or (granule is not None and granule.begin < high and low < granule.end)

    def _granule(self, slot: int, mapping: SharedMapping, low: int, high: int) -> _Granule | None:
        """The registered granule of a grid slot, made where need be; None where it cannot be."""
        granule = self._granules.get(slot)
        if granule is not None:
            if granule.covers(mapping, low, high):
                self._granules.move_to_end(slot)
                return granule
            if granule.num_users:
                return None  # in use under what the addresses meant before, or mappings meet here and another has it
            self._drop(slot)
        if mapping.file in self._refused.files or slot in self._refused.granules:
            return None
        if self._passing[slot]:
            return None  # who is not counted as a user would read on from here when the registration goes
        begin = max(mapping.begin, slot * self._granule_bytes)
        end = min(mapping.end, (slot + 1) * self._granule_bytes)
        if not self._make_room(end - begin):
            return None
        error = self._register(begin, end - begin, mapping.writable)
        if error:
            self._refuse(slot, mapping, end - begin, error)
            return None
        granule = _Granule(begin, end, mapping.file, mapping.shift)
        self._granules[slot] = granule
        self.counts.registered_bytes += granule.nbytes
        return granule

    def _register(self, begin: int, nbytes: int, writable: bool) -> int:
        """For reading only where the device can, so that nothing on it can write to the pool."""
        if self._refused.read_only:
            return self._runtime.register(begin, nbytes, read_only=False) if writable else NOT_SUPPORTED
        error = self._runtime.register(begin, nbytes, read_only=True)
        if not error or error == ALREADY_REGISTERED:
            return error
        # What a device that cannot do it answers differs: a plain registration shows whether it was that.
        plain_error = self._runtime.register(begin, nbytes, read_only=False) if writable else error
        self._refused.read_only = error == NOT_SUPPORTED or not plain_error
        return plain_error

    def _make_room(self, nbytes: int) -> bool:
        for slot in list(self._granules):
            if self.counts.registered_bytes + nbytes <= self._max_bytes:
                break
            if not self._granules[slot].num_users:
                self._drop(slot)
        return self.counts.registered_bytes + nbytes <= self._max_bytes

    def _drop(self, slot: int) -> None:
        granule = self._granules.pop(slot)
        self.counts.registered_bytes -= granule.nbytes
        error = self._runtime.unregister(granule.begin)
        if error:
            # The pages may still be registered, and a copy over them would fail: never copy from there directly again.
            self._refused.granules.add(slot)
            _LOG.warning(
                "%s of shared memory stay page-locked: %s; they come back when the process ends",
                format_bytes(granule.nbytes),
                self._runtime.describe(error),
            )

    def _refuse(self, slot: int, mapping: SharedMapping, nbytes: int, error: int) -> None:
        if error == ALREADY_REGISTERED:
            self._refused.granules.add(slot)
            return
        self._refused.files.add(mapping.file)
        _LOG.warning(
            "%s of the pool's shared memory could not be page-locked: %s; its blocks are copied through the driver's "
            "buffers from now on; %s",
            format_bytes(nbytes),
            self._runtime.describe(error),
            LOCK_REMEDY,
        )
