"""The question a routing policy answers, and the form of its answer. Columns, because plans have 100,000 extents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.topology import Topology
from megamind_ray.policies.costs import Float64Array, TransferCosts

__all__ = ["RoutingDecision", "RoutingPolicy", "RoutingRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a routing policy sees. Nodes are indices into ``topology.nodes``.

    Attributes:
        topology: The hardware.
        costs: What reading, cutting and sending bytes costs on it.
        nbytes: Size of each extent.
        only_rank: The rank that alone needs the extent, -1 where several do.
        first_node: One entry more than there are extents; the consumer nodes of extent ``i`` are
            ``nodes[first_node[i] : first_node[i + 1]]``, ascending.
        nodes: See ``first_node``.
        need: By entry of ``nodes``, the share of the extent that the node needs; None where each needs all.
        busy: ``[node, kind]``, seconds for which resources are busy whoever reads, as with copies; None for none.
        readers: By node, whether it can read the checkpoint; None where all can.
        pool_room_bytes: By node, the bytes of blocks that can stay in its pool (bins to fill); None where blocks only
            pass through.
        allow_direct: Whether a rank may read for itself.
        min_direct_bytes: Smallest extent that is worth a read by its rank.
    """

    topology: Topology
    costs: TransferCosts
    nbytes: Int64Array
    only_rank: Int64Array
    first_node: Int64Array
    nodes: Int64Array
    need: Float64Array | None = None
    busy: Float64Array | None = None
    readers: npt.NDArray[np.bool_] | None = None
    pool_room_bytes: Int64Array | None = None
    allow_direct: bool = True
    min_direct_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDecision:
    """A proposal, one entry per extent.

    Attributes:
        direct: True where the only rank reads for itself.
        node: Node that reads.
        reason: Index into ``reasons``.
        reasons: Few distinct texts.
    """

    direct: npt.NDArray[np.bool_]
    node: Int64Array
    reason: Int64Array
    reasons: tuple[str, ...]


class RoutingPolicy(Protocol):
    """Proposes route and reader of each extent. Pure: equal requests get equal decisions."""

    @property
    def name(self) -> str:
        """Name in the configuration, for messages."""
        ...

    def route(self, request: RoutingRequest) -> RoutingDecision:
        """Proposes for all extents at once."""
        ...
