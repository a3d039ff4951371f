"""One end of a NIXL wire: memory that others read, and memory that what is read comes into. No Ray (0030)."""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Any, Final

from megamind_ray.actors.messages import Place
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.mappings import SharedMapping, shared_mapping
from megamind_ray.device.strided import Bytes
from megamind_ray.errors import RequestError
from megamind_ray.units import MIB, format_bytes

__all__ = ["NIXL_MISSING", "NixlEndpoint", "WireError", "nixl_is_installed", "start_nixl"]

NIXL_MISSING: Final = "nixl is not installed"
_BACKEND: Final = "UCX"
# The pool is registered in parts, as blocks come to lie in them: registering pins memory, and of a large pool that
# nothing has touched yet, all of it would take minutes.
_REGION_BYTES: Final = 256 * MIB
_LOOK_S: Final = (1e-4, 1e-3)  # first and longest pause between two looks at a transfer
_PUMP_S: Final = 1e-3
_MOST_LATE: Final = 0.5  # of the receive memory: with more held by transfers that never end, nothing is read any more


class WireError(Exception):
    """A block could not be brought by NIXL. It never leaves the data plane, which has another way for it.

    Attributes:
        is_of_peer: The other side is gone, or silent: with its other blocks it would be no better.
    """

    def __init__(self, reason: str, *, is_of_peer: bool = False) -> None:
        super().__init__(reason)
        self.is_of_peer = is_of_peer


def nixl_is_installed() -> bool:
    """Whether there is a module of that name; nothing is imported."""
    return find_spec("nixl") is not None


def start_nixl(name: str) -> Any:
    """A NIXL agent with the UCX back end.

    Raises:
        RequestError: There is none to be had in this process; the message says why.
    """
    if not nixl_is_installed():
        raise RequestError(NIXL_MISSING)
    try:
        api = importlib.import_module("nixl._api")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
    except Exception as error:  # its errors have no base of their own, and libraries may be missing in many ways
        raise RequestError(f"nixl does not start ({type(error).__name__}: {error})") from error
    if _BACKEND not in agent.backends:
        raise RequestError(f"nixl is installed without its back end {_BACKEND}")
    return agent


@dataclass(slots=True, eq=False)
class _Late:
    """A transfer that was given up and may still write to its part of the receive memory."""

    transfer: Any
    begin: int
    nbytes: int


class _Room:
    """Which parts of the receive memory are free: first fit, so that memory that was touched is touched again."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # begin and end, sorted, never adjacent

    def take(self, nbytes: int) -> int | None:
        for position, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[position : position + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        return None

    def give(self, begin: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for one in sorted([*self._free, (begin, begin + nbytes)]):
            if merged and merged[-1][1] == one[0]:
                merged[-1] = (merged[-1][0], one[1])
            else:
                merged.append(one)
        self._free = merged


class NixlEndpoint:
    """All methods may be called from any thread.

    NIXL's own agent is not made for threads: calls into it are made one after the other, while bytes move.

    Args:
        buffer_bytes: Memory that is read into, registered at once.
        pool_bytes: Shared mappings of this size or more are the pool: they stay as long as the process does, so a
            part of them can be registered once and for all.
        region_bytes: Size of such a part.
        start: Makes the NIXL agent.
        clock: Monotonic.

    Raises:
        RequestError: NIXL cannot be used in this process.
        CapacityError: There is no memory for the buffer.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int,
        pool_bytes: int,
        region_bytes: int = _REGION_BYTES,
        start: Callable[[str], Any] = start_nixl,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = f"megamind-{uuid.uuid4().hex}"
        self._agent = start(self.name)
        self._clock = clock
        self._pool_bytes, self._region_bytes = pool_bytes, region_bytes
        self._lock = threading.RLock()
        self._pool: SharedMapping | None = None
        self._regions: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._known: set[tuple[str, int]] = set()
        self._broken: str | None = None
        self._buffer: Bytes = host_buffer(buffer_bytes)
        self._address = self._buffer.ctypes.data
        self._room = _Room(buffer_bytes)
        self._returned = threading.Condition()
        self._late: list[_Late] = []
        self._stop = threading.Event()
        try:
            self._agent.register_memory([(self._address, buffer_bytes, 0, "")], "DRAM", [_BACKEND])
        except Exception as error:
            raise RequestError(f"nixl cannot register {format_bytes(buffer_bytes)} ({error}); see ulimit -l") from error
        threading.Thread(target=self._pump, name="nixl-progress", daemon=True).start()

    def close(self) -> None:
        """Ends the thread that makes progress; blocks are neither offered nor read any more."""
        self._stop.set()

    def place(self, address: int, nbytes: int) -> Place | None:
        """Where others can read these bytes; None where they are not in the pool's own mapping, or are none.

        Raises:
            WireError: The memory cannot be registered.
        """
        pool = self._mapping(address, nbytes) if nbytes else None
        if pool is None:
            return None
        parts, regions = [], []
        first, last = ((at - pool.begin) // self._region_bytes for at in (address, address + nbytes - 1))
        for number in range(first, last + 1):
            begin = pool.begin + number * self._region_bytes
            end = min(begin + self._region_bytes, pool.end)
            regions.append(self._region(begin, end))
            parts.append((max(address, begin), min(address + nbytes, end) - max(address, begin)))
        return Place(endpoint=self.name, parts=tuple(parts), metadata=tuple(regions))

    @contextmanager
    def read(self, place: Place, *, timeout_s: float) -> Iterator[Bytes]:
        """The bytes of a place, read-only, while inside the ``with``.

        Raises:
            WireError: They did not come, or there was no room for them in time.
        """
        until_s = self._clock() + timeout_s
        nbytes = sum(size for _, size in place.parts)
        if self._broken is not None:
            raise WireError(self._broken)
        begin = self._take(nbytes, until_s)
        transfer: Any = None
        is_over = True
        try:
            try:
                transfer = self._begin(place, begin)
                is_over = False
                self._wait(transfer, until_s)
                is_over = True
            except _TransferError as error:
                is_over = error.is_over
                if is_over:
                    self._forget(place.endpoint)
                raise WireError(f"reading from {place.endpoint}: {error}", is_of_peer=True) from error
            view = self._buffer[begin : begin + nbytes]
            view.flags.writeable = False
            yield view
        finally:
            self._give(transfer, begin, nbytes, is_over=is_over)

    def _mapping(self, address: int, nbytes: int) -> SharedMapping | None:
        pool = self._pool
        if pool is None or not pool.begin <= address <= address + nbytes <= pool.end:
            pool = shared_mapping(address, address + nbytes)
            # Objects that have no room in the pool get mappings of their own, which go with them.
            if pool is None or not pool.writable or pool.end - pool.begin < self._pool_bytes:
                return None
            self._pool = pool
        return pool

    def _region(self, begin: int, end: int) -> tuple[int, bytes]:
        with self._lock:
            found = self._regions.get((begin, end))
            if found is None:
                try:
                    descriptors = self._agent.register_memory([(begin, end - begin, 0, "")], "DRAM", [_BACKEND])
                    metadata = self._agent.get_partial_agent_metadata(descriptors, True, [_BACKEND])
                except Exception as error:
                    raise WireError(f"{format_bytes(end - begin)} of the pool cannot be registered: {error}") from error
                found = self._regions[begin, end] = (len(self._regions), metadata)
            return found

    def _begin(self, place: Place, begin: int) -> Any:
        with self._lock:
            try:
                for number, metadata in place.metadata:
                    if (place.endpoint, number) not in self._known:
                        self._agent.add_remote_agent(metadata)
                        self._known.add((place.endpoint, number))
                local, at = [], self._address + begin
                for _, size in place.parts:
                    local.append((at, size, 0))
                    at += size
                remote = [(address, size, 0) for address, size in place.parts]
                transfer = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, "DRAM"),
                    self._agent.get_xfer_descs(remote, "DRAM"),
                    place.endpoint,
                    b"",
                    [_BACKEND],
                )
            except Exception as error:
                raise _TransferError(f"cannot be begun ({type(error).__name__}: {error})") from error
            try:
                state = self._agent.transfer(transfer)
            except Exception as error:
                self._release(transfer)
                raise _TransferError(f"cannot be begun ({type(error).__name__}: {error})") from error
            if state == "ERR":
                self._release(transfer)
                raise _TransferError("cannot be begun")
            return transfer

    def _wait(self, transfer: Any, until_s: float) -> None:
        pause_s, longest_s = _LOOK_S
        while True:
            state = self._state(transfer)
            if state == "DONE":
                return
            if state == "ERR":
                raise _TransferError("the transfer failed")
            if self._clock() > until_s:
                raise _TransferError("they did not come in time", is_over=False)
            sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)

    def _state(self, transfer: Any) -> str:
        with self._lock:
            try:
                return str(self._agent.check_xfer_state(transfer))
            except Exception as error:
                # How NIXL says that the other side is gone: the transfer is over.
                raise _TransferError(f"{type(error).__name__}: {error}") from error

    def _take(self, nbytes: int, until_s: float) -> int:
        if nbytes > self._buffer.nbytes:
            raise WireError(
                f"a block of {format_bytes(nbytes)} has no room in wire.buffer_bytes = "
                f"{format_bytes(self._buffer.nbytes)}"
            )
        with self._returned:
            while (begin := self._room.take(nbytes)) is None:
                if self._look_at_late():
                    continue
                if self._clock() > until_s:
                    raise WireError(f"{format_bytes(nbytes)} of wire.buffer_bytes were not free in time")
                if sum(late.nbytes for late in self._late) > _MOST_LATE * self._buffer.nbytes:
                    raise WireError("transfers that were given up hold most of wire.buffer_bytes")
                self._returned.wait(_LOOK_S[1] if self._late else max(0.0, until_s - self._clock()))
            return begin

    def _give(self, transfer: Any, begin: int, nbytes: int, *, is_over: bool) -> None:
        with self._returned:
            if is_over:
                if transfer is not None:
                    self._release(transfer)
                self._room.give(begin, nbytes)
            else:
                # It may yet write there: the memory waits until it says that it is over.
                self._late.append(_Late(transfer, begin, nbytes))
            self._returned.notify_all()

    def _look_at_late(self) -> bool:
        """Whether memory came back."""
        num_before = len(self._late)
        for late in list(self._late):
            try:
                is_over = self._state(late.transfer) in ("DONE", "ERR")
            except _TransferError:
                is_over = True
            if is_over:
                self._late.remove(late)
                self._release(late.transfer)
                self._room.give(late.begin, late.nbytes)
        return len(self._late) < num_before

    def _release(self, transfer: Any) -> None:
        with self._lock:
            try:
                self._agent.release_xfer_handle(transfer)
            except Exception:  # noqa: BLE001 - it is over; NIXL keeps a list of handles that it could not free
                return

    def _forget(self, endpoint: str) -> None:
        """The connection is no good any more; whoever reads from there again makes another one."""
        with self._lock:
            known = {one for one in self._known if one[0] == endpoint}
            self._known -= known
            if known:
                try:
                    self._agent.remove_remote_agent(endpoint)
                except Exception:  # noqa: BLE001 - NIXL has forgotten it by itself
                    return

    def _pump(self) -> None:
        """Where there is no RDMA, the side that is read from has a part in it, and NIXL's own thread for that spins."""
        while not self._stop.wait(_PUMP_S):
            with self._lock:
                try:
                    self._agent.get_new_notifs([_BACKEND])
                except Exception as error:  # noqa: BLE001 - nobody is above this thread; who reads next is told
                    self._broken = f"NIXL makes no progress on this node any more ({type(error).__name__}: {error})"
                    return


class _TransferError(Exception):
    """A transfer did not come to its end, or to a bad one; ``is_over``: nothing of it will write any more."""

    def __init__(self, reason: str, *, is_over: bool = True) -> None:
        super().__init__(reason)
        self.is_over = is_over
