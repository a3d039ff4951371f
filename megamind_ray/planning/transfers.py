"""The cost model and the demands in the form in which policies see them (``policies.costs``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import numpy as np

from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.planning.columns import group_sets
from megamind_ray.planning.cost import CostModel, ResourceKind, Step
from megamind_ray.planning.grid import ChunkUse
from megamind_ray.planning.line import places_of
from megamind_ray.policies.costs import Float64Array, TransferCosts, TransferLoad

__all__ = ["NODE_KINDS", "transfer_costs", "transfer_load"]

# The resources that each node has for itself: the columns of ``TransferCosts``.
NODE_KINDS = (
    ResourceKind.DISK,
    ResourceKind.NIC_IN,
    ResourceKind.NIC_OUT,
    ResourceKind.WIRE_IN,
    ResourceKind.WIRE_OUT,
    ResourceKind.MEMORY,
    ResourceKind.CPU,
)
_COLUMN = {kind: column for column, kind in enumerate(NODE_KINDS)}


def transfer_costs(
    model: CostModel,
    *,
    verified: bool = False,
    run_bytes: float = np.inf,
    packed: bool = False,
    placed: bool = False,
) -> TransferCosts:
    """Seconds of each resource for each byte of each step, from the model.

    Args:
        model: The hardware.
        verified: Whether the checkpoint has recorded checksums, which its reader computes.
        run_bytes: Mean length of a run in a block.
        packed: Blocks lie in their extents as they are.
        placed: Ranks read for themselves what they copy.
    """
    nodes = model.topology.nodes
    read, pack, storage, crosses = _zeros(model), _zeros(model), np.zeros(len(nodes)), np.zeros(len(nodes))
    for index in range(len(nodes)):
        steps = [model.read(index), *([model.verify(index)] if verified else [])]
        _count(model, steps, read[index], nodes[index].id)
        storage[index] = _of_kind(model, steps[0], ResourceKind.STORAGE)
        crosses[index] = any(_of_kind(model, steps[0], kind) for kind in (ResourceKind.RACK_IN, ResourceKind.RACK_OUT))
        _count(model, [model.cut(index, run_bytes, packed=packed), model.put(index)], pack[index], nodes[index].id)
    send, take = _wires(model)
    storage_rack = None if model.topology.storage is None else model.topology.storage.rack
    known = [*(node.rack for node in nodes), *([] if storage_rack is None else [storage_rack])]
    racks = {name: index for index, name in enumerate(dict.fromkeys(known))}
    uplinks = {rack.name: 1 / rack.uplink_bytes_per_s for rack in model.topology.racks}
    return TransferCosts(
        read=read,
        pack=pack,
        send=send,
        take=take,
        storage=storage,
        rack=np.array([racks[node.rack] for node in nodes], np.int64),
        uplink=np.array([uplinks.get(name, 0.0) if name is not None else 0.0 for name in racks]),
        crosses=crosses,
        storage_rack=-1 if storage_rack is None else racks[storage_rack],
        line=places_of(model.topology),
        **_copies(model, placed=placed),
        cut=_cuts(model) if packed else None,
    )


def _cuts(model: CostModel) -> Float64Array:
    """What cutting takes beyond a block that lies in its extent as it is, however long its runs are."""
    strided, whole = _zeros(model), _zeros(model)
    for index, node in enumerate(model.topology.nodes):
        _count(model, [model.cut(index)], strided[index], node.id)
        _count(model, [model.cut(index, packed=True)], whole[index], node.id)
    return np.maximum(strided - whole, 0.0)


def _wires(model: CostModel) -> tuple[Float64Array, Float64Array]:
    """What a byte between two nodes takes of the one and of the other; it is the same whoever is at the other end."""
    send, take, nodes = _zeros(model), _zeros(model), model.topology.nodes
    for index, node in enumerate(nodes):
        other = (index + 1) % len(nodes)
        if other != index:
            _count(model, [model.wire(index, other)], send[index], node.id)
            _count(model, [model.wire(other, index), model.put(index)], take[index], node.id)
    return send, take


class _Copies(TypedDict):
    gpu_node: Int64Array
    copy: Float64Array
    device: Float64Array
    gpu_switch: Int64Array
    switch: Float64Array


def _copies(model: CostModel, *, placed: bool) -> _Copies:
    rows: list[Float64Array] = []
    node_of, device, switch_of, switches = list[int](), list[float](), list[int](), dict[int, float]()
    for index, node in enumerate(model.topology.nodes):
        for position in range(len(node.gpus)):
            step = model.place(index, position) if placed else model.copy(index, position)
            row = np.zeros(len(NODE_KINDS))
            _count(model, [step], row, node.id)
            rows.append(row)
            node_of.append(index)
            device.append(_of_kind(model, step, ResourceKind.DEVICE))
            through = [item for item, _ in step.uses if model.resources[item].kind is ResourceKind.SWITCH]
            for item in through:
                switches.setdefault(item, 1 / model.resources[item].capacity)
            switch_of.append(list(switches).index(through[0]) if through else -1)
    return {
        "gpu_node": np.array(node_of, np.int64),
        "copy": np.array(rows).reshape(-1, len(NODE_KINDS)),
        "device": np.array(device),
        "gpu_switch": np.array(switch_of, np.int64),
        "switch": np.array(list(switches.values())),
    }


def _zeros(model: CostModel) -> Float64Array:
    return np.zeros((len(model.topology.nodes), len(NODE_KINDS)))


def _count(model: CostModel, steps: Iterable[Step], row: Float64Array, node: str) -> None:
    """Adds what the steps take of the resources that are this node's own."""
    for step in steps:
        for item, units in step.uses:
            resource = model.resources[item]
            if resource.where == node and resource.kind in _COLUMN:
                row[_COLUMN[resource.kind]] += units / resource.capacity


def _of_kind(model: CostModel, step: Step, kind: ResourceKind) -> float:
    """Seconds of the resources of a kind."""
    uses = [(units, model.resources[item]) for item, units in step.uses]
    return sum(units / resource.capacity for units, resource in uses if resource.kind is kind)


def transfer_load(
    demands: Demands, use: ChunkUse, *, direct: bool = True, strided_bytes: Float64Array | None = None
) -> TransferLoad:
    """Bytes by who needs them: chunks that the same sets need are a class.

    Args:
        demands: What the ranks need.
        use: Which sets need how much of each chunk.
        direct: Whether a rank may read for itself what it alone needs.
        strided_bytes: By kind of chunk, see ``TransferLoad``.
    """
    sets = group_sets(demands.consumer_sets)
    kind = np.repeat(np.arange(len(use.sets), dtype=np.int64), use.sets.counts)
    return TransferLoad(
        first_rank=sets.first,
        ranks=sets.values,
        first_part=use.sets.first,
        part_set=use.sets.values,
        part_bytes=use.nbytes,
        class_bytes=np.asarray(np.bincount(kind, weights=use.nbytes, minlength=len(use.sets)), np.float64),
        direct=direct,
        strided_bytes=strided_bytes,
    )
