"""The cluster benchmark's scenario in which storage is ten times slower for one of the hosts that load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import megamind_ray as mm
from benchmarks._cluster_rows import Found, load_in_turns
from benchmarks._cluster_scenarios import NIC_BYTES_PER_S, STORAGE_BYTES_PER_S, storage_row, with_head
from benchmarks._cluster_session import Expected, Loaded, Order, Session, Settings
from megamind_ray.testing.testbed import switched
from megamind_ray.units import MIB

__all__ = ["SLOW_BYTES_PER_S", "straggler"]

_HOSTS: Final = 2  # with more, those in the middle of the line read nothing
# Of a link, a half is for what the host reads, the other for what the other one reads.
SLOW_BYTES_PER_S: Final = NIC_BYTES_PER_S / _HOSTS / 10
# A node has a twentieth of what it reads under way, as with the defaults and a model of 8B; else all has begun at once.
_FEW_IN_FLIGHT: Final[Settings] = {"io": {"remote_threads": 4, "extent_bytes": MIB}}
_LEFT_ALONE: Final[Settings] = {**_FEW_IN_FLIGHT, "straggler": {"replan": False}}
_TARGET = 2.0


def straggler(found: Found, expected: Expected, *, rounds: int) -> None:
    """Two hosts load everything; for one of them storage is slow, with re-planning and without, in turns."""
    topology = with_head(
        switched(num_hosts=_HOSTS, nic_bytes_per_s=NIC_BYTES_PER_S, storage_bytes_per_s=STORAGE_BYTES_PER_S)
    )
    undisturbed, left, moved = "straggler: none", "straggler: left alone", "straggler: re-planned"
    with Session(topology, expected) as session:
        server = session.bed.serve(expected.checkpoint.folder)
        orders = {
            name: Order(uri=server.uri, parallel=mm.Parallel(dp=_HOSTS), settings=settings)
            for name, settings in ((undisturbed, _FEW_IN_FLIGHT), (left, _LEFT_ALONE), (moved, _FEW_IN_FLIGHT))
        }
        whole = {undisturbed: orders.pop(undisturbed)}
        loads = load_in_turns(found, session, whole, topology, server=server, rounds=rounds)
        slow = next(host for host in session.bed.hosts if host.node.gpus)
        server.throttle(slow.address, SLOW_BYTES_PER_S)
        loads |= load_in_turns(found, session, orders, topology, server=server, rounds=rounds, predict=False)
    storage_row(found, moved, loads[moved], expected)
    ratios = _ratios(loads[left], loads[moved])
    found.row("straggler: seconds left alone / re-planned", ratios, target=_TARGET, better="higher")
    found.row("straggler: seconds re-planned / without one", _ratios(loads[moved], loads[undisturbed]))
    faults = [[fault for fault in loaded.report.faults if fault.kind == "straggler"] for loaded in loads[moved]]
    found.row(
        "straggler: bytes read twice", [float(loaded.report.bytes_retried) for loaded in loads[moved]], "bytes", 0
    )
    found.details.setdefault(moved, {})["moves"] = [
        [f"{fault.at_s:.2f} s: {fault.where}: {fault.action}" for fault in one] for one in faults
    ]


def _ratios(over: Sequence[Loaded], under: Sequence[Loaded]) -> list[float]:
    return [one.transfer_s / other.transfer_s for one, other in zip(over, under, strict=False)]
