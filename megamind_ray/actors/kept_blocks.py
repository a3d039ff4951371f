"""The blocks of loaded models that stay in a node's pool, and how they come to another node's (0028). No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megamind_ray.actors.block_pool import PooledBlock
from megamind_ray.actors.dataplane import DataPlane, UInt8Array
from megamind_ray.actors.messages import BlockHandle, Crc32Array
from megamind_ray.core.evacuation import HeldBlock
from megamind_ray.core.ids import BlockId, ExtentId, LoadId, Rank
from megamind_ray.core.report import Kept
from megamind_ray.errors import ClusterError, IntegrityError
from megamind_ray.io.checksum import crc32

__all__ = ["BlockKey", "CopyResult", "Heirloom", "Holdings", "KeptBlocks"]

BlockKey = tuple[LoadId, BlockId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """All that a node keeps, by load."""

    blocks: Mapping[LoadId, tuple[HeldBlock, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """What came of taking blocks over: how much the node keeps now of each load that they were of."""

    kept: Mapping[LoadId, Kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heirloom:
    """A kept block that a node hands to another one.

    Attributes:
        load, block: Which.
        extent: Plan id of the extent that it was cut from.
        ranks: That took it.
        nbytes: Size.
        crc32: Of all its bytes, as they lie in the pool now.
        crc32s: Of each segment, as it was cut.
        handle: How to get the bytes.
    """

    load: LoadId
    block: BlockId
    extent: ExtentId
    ranks: tuple[Rank, ...]
    nbytes: int
    crc32: int
    crc32s: Crc32Array
    handle: BlockHandle


class KeptBlocks:
    """What a node keeps. All methods may be called from any thread.

    Args:
        plane: Where blocks are put.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._lock = threading.Lock()
        self._kept: dict[LoadId, dict[int, PooledBlock]] = {}

    def add(self, load: LoadId, blocks: Mapping[int, PooledBlock]) -> None:
        """Keeps blocks of a load, beside those that are kept of it already."""
        with self._lock:
            self._kept.setdefault(load, {}).update(blocks)

    def drop(self, load: LoadId) -> None:
        """Keeps nothing of a load any more."""
        with self._lock:
            self._kept.pop(load, None)

    def holdings(self) -> Holdings:
        """All that is kept."""
        with self._lock:
            kept = {load: [entry for _, entry in sorted(blocks.items())] for load, blocks in self._kept.items()}
        return Holdings(
            blocks={
                load: tuple(HeldBlock(block=one.block, nbytes=one.nbytes, ranks=one.ranks) for one in entries)
                for load, entries in kept.items()
            }
        )

    def kept(self, load: LoadId) -> Kept:
        """How much is kept of a load."""
        with self._lock:
            blocks = self._kept.get(load, {}).values()
            return Kept(num_blocks=len(blocks), num_bytes=sum(block.nbytes for block in blocks))

    def hand(self, keys: Sequence[BlockKey], *, timeout_s: float) -> tuple[Heirloom, ...]:
        """Blocks for another node.

        Args:
            keys: Which.
            timeout_s: To look at their bytes, which are here.

        Raises:
            ClusterError: One of them is not kept here.
        """
        entries = [self._entry(key) for key in keys]
        data = self._plane.get([entry.handle for entry in entries], timeout_s=timeout_s)
        return tuple(
            Heirloom(
                load=load,
                block=entry.block,
                extent=entry.extent,
                ranks=entry.ranks,
                nbytes=entry.nbytes,
                crc32=crc32(one),
                crc32s=entry.crc32s,
                handle=entry.handle,
            )
            for (load, _), entry, one in zip(keys, entries, data, strict=True)
        )

    def copy(
        self, keys: Sequence[BlockKey], hand: Callable[[Sequence[BlockKey]], Sequence[Heirloom]], *, timeout_s: float
    ) -> CopyResult:
        """Takes over blocks that another node keeps, one after the other; the checksums of their segments come along.

        Args:
            keys: Which. There is room for them here: the planner knows that.
            hand: Asks the other node's ``hand``.
            timeout_s: For each block.

        Raises:
            ClusterError: The other node does not answer, or this one's pool takes no more. What was taken over by then
                stays; the same keys again go on from there.
            IntegrityError: A block came with other bytes than it has there.
        """
        missing = [key for key in keys if not self._has(key)]
        for heirloom in hand(missing) if missing else ():
            self.add(heirloom.load, {heirloom.block: self._copied(heirloom, timeout_s)})
        return CopyResult(kept={load: self.kept(load) for load, _ in keys})

    def _copied(self, heirloom: Heirloom, timeout_s: float) -> PooledBlock:
        """The block in this node's pool."""
        with self._plane.fetch(heirloom.handle, timeout_s=timeout_s) as data:
            return self._checked(heirloom, data)

    def _checked(self, heirloom: Heirloom, data: UInt8Array) -> PooledBlock:
        """What came, put into this node's pool where it is what was sent."""
        found = crc32(data)
        if data.nbytes != heirloom.nbytes or found != heirloom.crc32:
            raise IntegrityError(
                f"block {heirloom.block} of load {heirloom.load} came from another node with {data.nbytes} bytes and "
                f"CRC-32 {found:08x}, and has {heirloom.nbytes} and {heirloom.crc32:08x} there; check the memory and "
                "the network of both nodes",
                file=str(heirloom.extent),
            )
        return PooledBlock(
            block=heirloom.block,
            extent=heirloom.extent,
            nbytes=heirloom.nbytes,
            crc32s=heirloom.crc32s,
            handle=self._plane.put(data),
            ranks=heirloom.ranks,
        )

    def _has(self, key: BlockKey) -> bool:
        with self._lock:
            return key[1] in self._kept.get(key[0], {})

    def _entry(self, key: BlockKey) -> PooledBlock:
        load, block = key
        with self._lock:
            entry = self._kept.get(load, {}).get(block)
        if entry is None:
            raise ClusterError(
                f"this node does not keep block {block} of load {load}; the planner has lost track of it, load the "
                "model again"
            )
        return entry
