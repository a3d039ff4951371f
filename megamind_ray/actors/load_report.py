"""Sums up what agents and workers counted into the report of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

import numpy as np

from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.transfer import TransferResult
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ModelName, NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.report import Fault, Kept, LoadReport, Verified
from megamind_ray.core.topology import Topology
from megamind_ray.core.wires import WIRE_TITLES, WireChoice
from megamind_ray.errors import masked
from megamind_ray.planning.capacity import comes_to
from megamind_ray.units import format_bytes

__all__ = ["build_report", "pool_notes", "wire_notes"]

_FULL: Final = "the pool's share for kept blocks is full (pool.max_fraction x pool.keep_fraction)"
_LOST: Final = "what a lost node had kept is gone with it"
_GIVEN: Final = "what a slow node gave others to read, and does not need itself, does not come to it any more"


def build_report(
    name: ModelName,
    request: LoadRequest,
    manifest: Manifest,
    result: TransferResult,
    *,
    keep_blocks: Mapping[NodeId, Int64Array],
    seconds: Mapping[str, float],
    started_at: str,
    notes: tuple[str, ...] = (),
) -> LoadReport:
    """The report of a load that has ended well.

    Args:
        name: Of the model.
        request: What was asked for.
        manifest: The checkpoint.
        result: What was moved.
        keep_blocks: Per node, the blocks that were to stay.
        seconds: By phase and ``total``.
        started_at: ISO 8601, UTC.
        notes: What the plan does not know.
    """
    plan, agents = result.plan, result.agents.values()
    bytes_read = sum(status.bytes_read for status in agents) + sum(rank.bytes_read for rank in result.ranks)
    bytes_retried = sum(status.bytes_retried for status in agents) + sum(rank.bytes_retried for rank in result.ranks)
    sent = sum(status.bytes_sent for status in agents)
    return LoadReport(
        model=name,
        uri=masked(request.uri),
        parallel=asdict(request.parallel),
        started_at=started_at,
        bytes_total=plan.bytes_total,
        bytes_from_storage=bytes_read,
        bytes_headers=manifest.header_bytes,
        bytes_retried=bytes_retried,
        bytes_over_network=sent,
        bytes_by_wire=_by_wire(sent, sum(status.bytes_nixl for status in agents)),
        bytes_to_device=sum(rank.report.bytes_to_device for rank in result.ranks),
        bytes_replicated=plan.bytes_replicated,
        seconds=dict(seconds),
        throughput_bytes_per_s=bytes_read / seconds["transfer"] if bytes_read else 0.0,
        ranks=tuple(rank.report for rank in result.ranks),
        faults=_faults(result),
        kept=_kept(plan, result, keep_blocks) if request.keep else Kept(),
        verified=_verified(result),
        notes=(*plan.notes, *notes, *wire_notes(request.wire, sent)),
    )


def pool_notes(topology: Topology) -> tuple[str, ...]:
    """Says where a pool is half taken already: a load through what is left is slow."""
    return tuple(
        f"node {node.address or node.id}: {format_bytes(node.pool_taken_bytes)} of its object store of "
        f"{format_bytes(node.pool_bytes)} were taken before the load, by kept blocks of other models and by objects of "
        "others"
        for node in topology.nodes
        if node.pool_taken_bytes > node.pool_bytes / 2
    )


def wire_notes(wire: WireChoice, num_bytes: int) -> tuple[str, ...]:
    """Which wire carried the bytes that went from node to node, and why."""
    return (f"blocks went from node to node by {WIRE_TITLES[wire.wire]}: {wire.reason}",) if num_bytes else ()


def _by_wire(num_bytes: int, by_nixl: int) -> dict[str, int]:
    """What was handed over and has not come by NIXL came by Ray's object store; what was lost on the way counts too."""
    found = {"ray": max(0, num_bytes - by_nixl), "nixl": min(num_bytes, by_nixl)}
    return {wire: count for wire, count in found.items() if count}


def _faults(result: TransferResult) -> tuple[Fault, ...]:
    return (
        *result.faults,
        *(fault for status in result.agents.values() for fault in status.faults),
        *(fault for rank in result.ranks for fault in rank.faults),
    )


def _kept(plan: Plan, result: TransferResult, keep_blocks: Mapping[NodeId, Int64Array]) -> Kept:
    """Replicas count in what is kept; a block is missing if no node has it."""
    kept = {node: status.kept for node, status in result.agents.items() if status.kept.num_blocks}
    sizes = plan.tables["blocks"]["nbytes"].to_numpy()
    held = {node: keep_blocks[node][comes_to(plan, node)[keep_blocks[node]]] for node in kept}
    somewhere = np.unique(np.concatenate([np.zeros(0, np.int64), *held.values()]))
    missing = int(sizes.sum() - sizes[somewhere].sum())
    reason = _GIVEN if any(len(held[node]) < len(keep_blocks[node]) for node in kept) else _FULL
    if any(fault.kind == "node_lost" for fault in result.faults):
        reason = _LOST
    return Kept(
        num_blocks=sum(one.num_blocks for one in kept.values()),
        num_bytes=sum(one.num_bytes for one in kept.values()),
        bytes_not_kept=missing,
        reason=reason if missing else "",
    )


def _verified(result: TransferResult) -> Verified:
    """The weakest level of whatever read something; a checkpoint without a byte counts as ``transit``."""
    levels = {status.verified for status in result.agents.values()} | {rank.verified for rank in result.ranks}
    order: tuple[Verified, ...] = ("off", "transit", "reference")
    return next((level for level in order if level in levels), "transit")
