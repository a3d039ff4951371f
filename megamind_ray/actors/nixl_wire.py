"""NIXL as a data plane: other nodes read blocks in Ray's object store where they lie; Ray is the way out (0030)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any, Final

from megamind_ray.actors.dataplane import DataPlane, UInt8Array
from megamind_ray.actors.messages import BlockHandle, Offer, Place
from megamind_ray.actors.nixl_endpoint import NixlEndpoint, WireError
from megamind_ray.core.report import Fault
from megamind_ray.errors import ClusterError

__all__ = ["NixlWire"]

_LEAST_S: Final = 1.0
_PART_OF_TIME: Final = 0.5  # of a fetch's time; the rest is for Ray


class _Held:
    """A block that was put here. To other processes it is the ref alone.

    Attributes:
        ref: Keeps it alive.
        view: Its bytes, while it is offered: they must not move.
        place: Where others read it; None: not offered so yet, or it cannot be.
    """

    __slots__ = ("place", "ref", "view")

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self.view: UInt8Array | None = None
        self.place: Place | None = None

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _same, (self.ref,)


class NixlWire:
    """Blocks of one load on one node. All methods may be called from any thread.

    Attributes:
        bytes_read: What NIXL brought.

    Args:
        store: Where blocks are put, and the wire for those that NIXL does not bring.
        endpoint: Of this process.
        where: Name of the node, for messages.
    """

    def __init__(self, store: DataPlane, endpoint: NixlEndpoint, *, where: str = "") -> None:
        self._store, self._endpoint, self._where = store, endpoint, where
        self._lock = threading.Lock()
        self._troubles: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # by endpoint: each further block from there would cost a deadline
        self.bytes_read = 0

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What NIXL failed at, each thing once."""
        with self._lock:
            return tuple(
                Fault(
                    kind="wire_failed",
                    where=f"node {self._where}: {what}",
                    action=f"{count} blocks by Ray's object store instead",
                )
                for what, count in self._troubles.items()
            )

    def put(self, data: UInt8Array) -> BlockHandle:
        return _Held(self._store.put(data))

    def get(self, handles: Sequence[BlockHandle], *, timeout_s: float) -> list[UInt8Array]:
        return self._store.get([_ref(handle) for handle in handles], timeout_s=timeout_s)

    def offer(self, handle: BlockHandle) -> BlockHandle:
        if not isinstance(handle, _Held):
            return handle
        if handle.view is None:
            try:
                (view,) = self._store.get([handle.ref], timeout_s=_LEAST_S)
                handle.place = self._endpoint.place(view.ctypes.data, view.nbytes)
                handle.view = None if handle.place is None else view
            except (WireError, ClusterError) as error:
                self._note(str(error))
        return handle.ref if handle.place is None else Offer(handle=handle.ref, place=handle.place)

    def settle(self, handle: BlockHandle) -> BlockHandle:
        return _ref(handle)

    @contextmanager
    def fetch(self, handle: BlockHandle, *, timeout_s: float) -> Iterator[UInt8Array]:
        until_s = monotonic() + timeout_s
        with ExitStack() as held:
            data = self._read(handle.place, timeout_s, held) if isinstance(handle, Offer) else None
            if data is None:
                rest_s = max(_LEAST_S, until_s - monotonic())
                data = held.enter_context(self._store.fetch(_ref(handle), timeout_s=rest_s))
            yield data

    def _read(self, place: Place, timeout_s: float, held: ExitStack) -> UInt8Array | None:
        if place.endpoint in self._failed:
            self._note(self._failed[place.endpoint])
            return None
        try:
            data = held.enter_context(self._endpoint.read(place, timeout_s=_PART_OF_TIME * timeout_s))
        except WireError as error:
            if error.is_of_peer:
                self._failed.setdefault(place.endpoint, str(error))
            self._note(str(error))
            return None
        with self._lock:
            self.bytes_read += data.nbytes
        return data

    def _note(self, what: str) -> None:
        with self._lock:
            self._troubles[what] = self._troubles.get(what, 0) + 1


def _ref(handle: BlockHandle) -> BlockHandle:
    return handle.ref if isinstance(handle, _Held) else handle.handle if isinstance(handle, Offer) else handle


def _same(ref: Any) -> Any:
    return ref
