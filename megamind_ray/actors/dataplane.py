"""How blocks travel: put on one process, got in another. Ray's object store is the default wire (0030)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import ray

from megamind_ray.actors.messages import BlockHandle, Offer
from megamind_ray.errors import ClusterError

__all__ = ["DataPlane", "RayObjectStore", "UInt8Array"]

UInt8Array = npt.NDArray[np.uint8]

# For the get of a block whose wait took nearly all of the time.
_LEAST_S: Final = 1.0


class DataPlane(Protocol):
    """A wire for blocks. The holder of a handle keeps the block alive; dropping the last handle frees it."""

    def put(self, data: UInt8Array) -> BlockHandle:
        """Copies the bytes into the pool of this node.

        Raises:
            ClusterError: It does not take them.
        """

    def get(self, handles: Sequence[BlockHandle], *, timeout_s: float) -> list[UInt8Array]:
        """The bytes of each handle, read-only, without a copy where they are on this node.

        Raises:
            ClusterError: A block is lost, or did not arrive in time.
        """

    def offer(self, handle: BlockHandle) -> BlockHandle:
        """What to hand to another node, whose plane then fetches the block. Never fails for a block that is here.

        Args:
            handle: Of a block that was put here. Whoever offers it holds it until the other node says that it has it.
        """

    def fetch(self, handle: BlockHandle, *, timeout_s: float) -> AbstractContextManager[UInt8Array]:
        """The bytes, read-only, of a block that another node has offered, while other threads put and get.

        They are valid inside the ``with`` alone: their memory is used again.

        Raises:
            ClusterError: As ``get``.
        """

    def settle(self, handle: BlockHandle) -> BlockHandle:
        """The block stays here when its load has ended: what is to keep it, for any plane of this node."""


class RayObjectStore:
    """Blocks as uint8 numpy objects in Ray's object store. torch tensors would be copied on put and on get."""

    def put(self, data: UInt8Array) -> BlockHandle:
        try:
            return ray.put(data)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"{data.nbytes} bytes could not be put into this node's pool ({error}); see `ray memory` for what "
                "fills it"
            ) from error

    def get(self, handles: Sequence[BlockHandle], *, timeout_s: float) -> list[UInt8Array]:
        try:
            blocks: list[UInt8Array] = ray.get(list(handles), timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ClusterError(
                f"{len(handles)} blocks could not be fetched from the pool within {timeout_s:g} s ({error}); "
                "the node that holds them is lost or unreachable"
            ) from error
        return blocks

    def offer(self, handle: BlockHandle) -> BlockHandle:
        return handle

    def settle(self, handle: BlockHandle) -> BlockHandle:
        return handle

    @contextmanager
    def fetch(self, handle: BlockHandle, *, timeout_s: float) -> Iterator[UInt8Array]:
        if isinstance(handle, Offer):  # of a node that has another wire as well
            handle = handle.handle
        until_s = monotonic() + timeout_s
        # A get that waits for another node keeps all puts of this process waiting with it; a wait does not. For blocks
        # that are here, it would be one more call.
        there, _ = ray.wait([handle], timeout=timeout_s)
        if not there:
            raise ClusterError(
                f"a block of another node did not come within {timeout_s:g} s; that node is lost or unreachable"
            )
        yield self.get([handle], timeout_s=max(_LEAST_S, until_s - monotonic()))[0]
