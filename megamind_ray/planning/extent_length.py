"""How long extents are: those that go through a pool, and those that one rank reads by itself (docs/design/0021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.exchange import RANK_BATCH, RELAY_SHARE, ROOM_IN_POOL
from megamind_ray.core.topology import Host, Topology
from megamind_ray.planning.capacity import keep_budget_bytes, pool_budget_bytes
from megamind_ray.planning.cost import CostModel

__all__ = ["extent_lengths"]

# Of the time in which an agent's storage brings an extent, its Python may be busy with the extent's block. More, and
# ranks that come at odd moments make it the bottleneck.
_BUSY_SHARE: Final = 0.5
# Each thread of the agent has an extent in a staging buffer.
_LONGEST: Final = 4


def extent_lengths(
    topology: Topology,
    node_of_rank: Int64Array,
    config: Config,
    chunk_bytes: int,
    *,
    remote: bool,
    keep: bool,
    readers: Int64Array | None = None,
) -> tuple[int, int]:
    """Longest extent that goes through a pool, and longest one that a rank reads for itself, in whole chunks.

    Where ``io.pool_extent_bytes`` is 0, the first is ``io.extent_bytes``, doubled (up to four times as long) until no
    agent spends more than half of the time that its storage takes on what a block costs beside its bytes, or the pools
    would have no room for one in each thread. Both are at most a quarter of what blocks may take of the smallest pool.

    Args:
        topology: The hardware.
        node_of_rank: By rank, the position of its node.
        config: ``io.extent_bytes``, ``io.pool_extent_bytes``, and how much of the pools blocks may take.
        chunk_bytes: The chunk grid.
        remote: Whether the checkpoint is behind a network.
        keep: Whether blocks are to stay in the pools.
        readers: Positions of the nodes that can read the checkpoint; None: all that have ranks.
    """
    used, num_ranks = np.unique(node_of_rank, return_counts=True)
    through = used if readers is None else np.union1d(used, readers)
    nodes = [topology.nodes[position] for position in through.tolist()]
    room = min(pool_budget_bytes(node, config) - (keep_budget_bytes(node, config) if keep else 0) for node in nodes)
    wanted = config.io.pool_extent_bytes
    if not wanted:
        agents = [config.io.for_agent(node.host.cores) for node in nodes]
        threads = max(io.remote_threads if remote else io.read_threads for io in agents)
        for_reads = 1.0 if len(nodes) == 1 else 1.0 - RELAY_SHARE
        # Not so long that threads which read would have to wait for room in a pool.
        most = max(config.io.extent_bytes, int(room * for_reads) // threads)
        wanted = min(most, _wanted(CostModel(topology, remote=remote), used, num_ranks, config))
    pool, own = (
        max(1, min(nbytes, room // ROOM_IN_POOL) // chunk_bytes) * chunk_bytes
        for nbytes in (wanted, config.io.extent_bytes)
    )
    return pool, own


def _wanted(model: CostModel, nodes: Int64Array, num_ranks: Int64Array, config: Config) -> int:
    nbytes, longest = config.io.extent_bytes, config.io.extent_bytes * _LONGEST
    pairs: Sequence[tuple[int, int]] = list(zip(nodes.tolist(), num_ranks.tolist(), strict=True))
    while nbytes < longest and any(
        _python_s(model.topology.nodes[node].host, ranks)
        > _BUSY_SHARE * model.read(node).alone_s(nbytes, model.resources)
        for node, ranks in pairs
    ):
        nbytes *= 2
    return nbytes


def _python_s(host: Host, num_ranks: int) -> float:
    """What a block costs an agent's Python: one put, and its part in a call of each rank that takes full batches.

    Half of a call is the agent's work, the other half the worker's (``CostModel.call``).
    """
    return host.put_s + num_ranks * (host.call_s / RANK_BATCH + host.take_s) / 2
