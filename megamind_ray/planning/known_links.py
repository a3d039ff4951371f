"""What is known of a cluster's links beforehand, brought together with the nodes that are there now."""

from __future__ import annotations

from dataclasses import replace

from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import RequestError, listed

__all__ = ["with_known_links", "without_leaving"]


def with_known_links(live: Topology, known: Topology, *, origin: str = "the topology file") -> Topology:
    """The live nodes with the racks, rates and storage of a topology that was measured or written before.

    Nodes are matched by name, which is Ray's id of a node that runs, else by address. What is there and how much of it
    is free, the live topology says; a node that the file lacks keeps its nominal rates and stands in no rack.

    Args:
        live: The nodes of a fleet.
        known: The hardware.
        origin: Where that is from, for messages.

    Raises:
        RequestError: None of the nodes is in it.
    """
    by_name = {node.id: node for node in known.nodes}
    by_address = {node.address: node for node in known.nodes if node.address}
    # Several nodes may share a host and its address: a name says more, where the file was made of this very cluster.
    found = {node.id: by_name.get(node.id) or by_address.get(node.address) for node in live.nodes}
    if not any(found.values()):
        raise RequestError(
            f"{origin}: it has none of the cluster's nodes; they have the addresses "
            f"{listed([node.address for node in live.nodes])}, and it names "
            f"{listed([node.address or node.id for node in known.nodes])}; give each node its address"
        )
    return replace(
        live,
        nodes=tuple(_joined(node, found[node.id]) for node in live.nodes),
        links=known.links,
        storage=known.storage,
        racks=known.racks,
        source=known.source,
    )


def without_leaving(live: Topology) -> Topology:
    """The nodes that stay: what is planned with."""
    return replace(live, nodes=tuple(node for node in live.nodes if not node.is_leaving))


def _joined(live: Node, known: Node | None) -> Node:
    if known is None:
        return live
    rates = {gpu.index: gpu for gpu in known.gpus}
    present = {gpu.index for gpu in live.gpus}
    return replace(
        live,
        gpus=tuple(_with_link(gpu, rates.get(gpu.index)) for gpu in live.gpus),
        disks=known.disks,
        nics=known.nics,
        rack=known.rack,
        switches=tuple(
            replace(switch, gpus=tuple(gpu for gpu in switch.gpus if gpu in present))
            for switch in known.switches
            if present.intersection(switch.gpus)
        ),
        host=known.host,
    )


def _with_link(live: Gpu, known: Gpu | None) -> Gpu:
    if known is None or known.kind != live.kind:
        return live
    return replace(
        live,
        pcie_bytes_per_s=known.pcie_bytes_per_s,
        numa=known.numa if live.numa is None else live.numa,
        nvlink_group=known.nvlink_group if live.nvlink_group is None else live.nvlink_group,
    )
