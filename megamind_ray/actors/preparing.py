"""From a request to what is to be moved: the checkpoint, who can read it, the fleet as it is, the plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from megamind_ray.actors.catalogue import Catalogue
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.load_report import pool_notes
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.pool_check import check_pool
from megamind_ray.actors.ticket import Ticket
from megamind_ray.actors.transfer import Transfer
from megamind_ray.actors.visibility import Visibility, look_around
from megamind_ray.actors.wire_choice import WireChooser
from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology
from megamind_ray.core.tracks import short_node
from megamind_ray.errors import CapacityError, RequestError, listed
from megamind_ray.io import open_manifest
from megamind_ray.io.copies import reference_notes, require_mirrors
from megamind_ray.planning import (
    RuleSource,
    build_demands,
    build_plan,
    choose_keep_blocks,
    pool_budget_bytes,
    spares_beside,
    with_known_links,
    without_leaving,
)

__all__ = ["Prepared", "open_checkpoint", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A load that may begin to move bytes.

    Attributes:
        request: What was asked for, its wire settled.
        transfer: What to move.
        notes: For its report.
    """

    request: LoadRequest
    transfer: Transfer
    notes: tuple[str, ...]


def open_checkpoint(request: LoadRequest) -> Manifest:
    """What is to be loaded.

    Raises:
        MegamindError: It cannot be read, or a mirror is not there.
    """
    manifest = open_manifest(request.uri, sidecar=request.sidecar, io=request.config.io, retry=request.config.retry)
    require_mirrors(manifest, request.config.io.mirrors, retry=request.config.retry)
    return manifest


def prepare(
    ticket: Ticket,
    request: LoadRequest,
    manifest: Manifest,
    *,
    load: LoadId,
    fleet: Fleet,
    catalogue: Catalogue,
    wires: WireChooser,
    fallback_rules: RuleSource | None,
) -> Prepared:
    """Brings the fleet up to date and plans a load.

    Args:
        ticket: Where it stands.
        request: What is asked for.
        manifest: The checkpoint.
        load: Its id.
        fleet: Who is to do it.
        catalogue: What is loaded already.
        wires: Chooses what carries blocks from node to node.
        fallback_rules: For families that planning has no rules for.

    Raises:
        MegamindError: It cannot be done as asked.
    """
    with ticket.timed("workers"):
        fleet.refresh()
        seen = look_around(fleet, manifest, request.config)
        topology, request = wires.decide(_topology_now(request, fleet, catalogue), request, manifest.nbytes)
    with ticket.timed("plan"):
        demands = build_demands(
            manifest,
            request.parallel,
            rules=request.rules,
            fallback_rules=fallback_rules or (),
            max_replicated_share=request.config.plan.max_replicated_share,
            allow_replication=request.allow_replication,
        )
        try:
            plan = build_plan(
                manifest, demands, topology, config=request.config, keep=request.keep, readers=seen.readers
            )
        except (RequestError, CapacityError) as error:
            raise explained(error, fleet.leaving) from error
        transfer = _transfer(load, plan, manifest, topology, request.config, seen, fleet)
    notes = (*pool_notes(topology), *reference_notes(manifest, request.config.io.mirrors), *seen.notes)
    return Prepared(request=request, transfer=transfer, notes=notes)


def explained(error: RequestError | CapacityError, leaving: Collection[NodeId]) -> RequestError | CapacityError:
    """Why a load cannot be planned, where nodes that are leaving might have been enough for it."""
    if not leaving:
        return error
    names = listed(sorted(map(short_node, leaving)))
    message = f"{error.message}. Not used, since leaving: {names}; `megamind drain NODE --cancel` takes a node back"
    if isinstance(error, CapacityError):
        return CapacityError(message, where=error.where, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes)
    return RequestError(message)


def _topology_now(request: LoadRequest, fleet: Fleet, catalogue: Catalogue) -> Topology:
    """The fleet, with the links of a topology file and what other models' kept blocks take of each pool."""
    topology = without_leaving(fleet.topology())
    if not topology.num_gpus:
        raise RequestError(
            "the cluster has no free GPU for this fleet; `ray status` shows who holds them. On a machine without "
            "GPUs ask for logical ones: `megamind load --num-gpus N` or connect(num_gpus=N) where that starts Ray, "
            "`ray start --num-gpus N` where Ray runs already"
        )
    if request.known is not None:
        topology = with_known_links(topology, request.known, origin=request.config.plan.topology)
    return catalogue.with_taken(topology)


def _transfer(
    load: LoadId,
    plan: Plan,
    manifest: Manifest,
    topology: Topology,
    config: Config,
    seen: Visibility,
    fleet: Fleet,
) -> Transfer:
    sizes = plan.tables["blocks"]["nbytes"].to_numpy()
    kept = choose_keep_blocks(plan, topology, config) if plan.keep else {}
    credit: dict[NodeId, int] = {}
    for node_id in map(NodeId, sorted({*plan.tables["ranks"]["node"].to_pylist(), *plan.pool_need_bytes})):
        stays = int(sizes[kept[node_id]].sum()) if node_id in kept else 0
        credit[node_id] = pool_budget_bytes(topology.node(node_id), config) - stays
        need = min(credit[node_id] + stays, plan.pool_need_bytes.get(node_id, 0))
        check_pool(fleet.agent_facts[node_id], need)
    readers = [node.id for node in topology.nodes if seen.readers is None or node.id in seen.readers]
    return Transfer(
        load=load,
        plan=plan,
        manifest=manifest,
        # Of the others, for a load that loses nodes and needs them.
        credit_bytes={node.id: pool_budget_bytes(node, config) for node in topology.nodes} | credit,
        keep_blocks={node: kept.get(node, np.zeros(0, np.int64)) for node in credit},
        readers=tuple(readers),
        spares=spares_beside(plan, topology),
    )
