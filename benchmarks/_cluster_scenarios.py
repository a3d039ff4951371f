"""Scenarios of the cluster benchmark in which nothing is broken: what moves over which link, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import megamind_ray as mm
from benchmarks._cluster_rows import Found, load_in_turns
from benchmarks._cluster_session import Expected, Loaded, LoadFailed, Order, Session, Settings, say
from megamind_ray.core.topology import Disk, Topology
from megamind_ray.testing.testbed import bed_node, in_two_racks, switched

__all__ = ["HEAD", "NIC_BYTES_PER_S", "STORAGE_BYTES_PER_S", "one_host", "racks", "shared", "storage_row", "with_head"]

NIC_BYTES_PER_S: Final = 62.5e6
STORAGE_BYTES_PER_S: Final = 4 * NIC_BYTES_PER_S  # four hosts can read at the rate of their links
HEAD: Final = "head"
_NUM_HOSTS, _QUICK_NUM_HOSTS = (1, 2, 4), (1, 2)
_MOST_BEDS: Final = 4
_STORAGE_RACK: Final = "r0"
_BLIND: Final[Settings] = {"placement": {"policy": "topology_blind"}}


def with_head(topology: Topology) -> Topology:
    """With a host before the others that has no GPU: head and driver are there, and not on a link that is measured."""
    return replace(topology, nodes=(bed_node(HEAD, num_gpus=0, nic_bytes_per_s=NIC_BYTES_PER_S), *topology.nodes))


def _has_files(topology: Topology) -> Topology:
    """With a disk in the first host, which alone has the checkpoint."""
    first, *others = topology.nodes
    return replace(topology, nodes=(replace(first, disks=(Disk(name="page cache", bytes_per_s=2e9),)), *others))


def one_host(found: Found, expected: Expected, *, rounds: int, quick: bool) -> None:
    """Three receivers of what one host has, which is without a GPU; not with ``quick``: has a rank of its own."""
    nbytes = expected.checkpoint.nbytes
    topology = _has_files(with_head(switched(num_hosts=3, nic_bytes_per_s=NIC_BYTES_PER_S)))
    one, three = "one-host: one receiver", "one-host: three receivers"
    with Session(topology, expected) as session:
        path = str(session.bed.head.give_folder(expected.checkpoint.folder, "model"))
        orders = {one: Order(uri=path, parallel=mm.Parallel()), three: Order(uri=path, parallel=mm.Parallel(dp=3))}
        loads = load_in_turns(found, session, orders, topology, rounds=rounds)
        _one_host_rows(found, "one-host", loads[one], loads[three], HEAD, nbytes)
    if quick:
        return
    # The source is a host with a GPU like the others: it has one of the ranks.
    name = "one-host, with a rank"
    alike: list[list[Loaded]] = []
    for num_hosts in (2, 4):
        topology = _has_files(switched(num_hosts=num_hosts, nic_bytes_per_s=NIC_BYTES_PER_S))
        with Session(topology, expected) as session:
            path = str(session.bed.head.give_folder(expected.checkpoint.folder, "model"))
            case = f"{name}: {num_hosts - 1} other{'s' if num_hosts > 2 else ''}"
            order = Order(uri=path, parallel=mm.Parallel(dp=num_hosts))
            alike.append(load_in_turns(found, session, {case: order}, topology, rounds=rounds)[case])
    _one_host_rows(found, name, alike[0], alike[1], "n0", nbytes)


def _one_host_rows(
    found: Found, name: str, one: Sequence[Loaded], three: Sequence[Loaded], source: str, nbytes: int
) -> None:
    ratios = _ratios(three, one)
    found.row(f"{name}: seconds of three receivers / of one", ratios, target=1.3)
    egress = [loaded.moved.hosts[source].sent_bytes / nbytes for loaded in three]
    found.row(f"{name}: bytes sent by the source / checkpoint", egress, target=1.15)


def shared(found: Found, expected: Expected, *, rounds: int, quick: bool) -> None:
    """Storage that all hosts reach: each byte once from it, and faster with more hosts."""
    by_hosts: dict[int, list[Loaded]] = {}
    numbers = _QUICK_NUM_HOSTS if quick else _NUM_HOSTS
    for num_hosts in numbers:
        topology = with_head(
            switched(num_hosts=num_hosts, nic_bytes_per_s=NIC_BYTES_PER_S, storage_bytes_per_s=STORAGE_BYTES_PER_S)
        )
        meshes = {f"shared: tp={num_hosts}": mm.Parallel(tp=num_hosts)}
        if num_hosts > 1:
            meshes[f"shared: dp={num_hosts}"] = mm.Parallel(dp=num_hosts)
        with Session(topology, expected) as session:
            server = session.bed.serve(expected.checkpoint.folder)
            orders = {case: Order(uri=server.uri, parallel=mesh) for case, mesh in meshes.items()}
            loads = load_in_turns(found, session, orders, topology, server=server, rounds=rounds)
        for case, done in loads.items():
            storage_row(found, case, done, expected)
            received = [_worst_received(loaded) for loaded in done]
            found.row(f"{case}: bytes received / its ranks', worst host", received, target=1.1)
        by_hosts[num_hosts] = loads[f"shared: tp={num_hosts}"]
    for fewer, more in pairwise(numbers):
        ratios = _ratios(by_hosts[more], by_hosts[fewer])
        found.row(f"shared: seconds on {more} hosts / on {fewer}", ratios, target=1.0)


def storage_row(found: Found, case: str, done: Sequence[Loaded], expected: Expected) -> None:
    """Adds the row of what storage sent, in parts of the checkpoint."""
    ratios = [loaded.storage_bytes / expected.checkpoint.nbytes for loaded in done]
    found.row(f"{case}: bytes from storage / checkpoint", ratios, target=1.0)
    if any(ratio < 1 for ratio in ratios):  # the ranks hold every byte: then they were not all counted
        found.failures[f"{case}: count"] = f"storage sent less than there is: {min(ratios):.6f}"


def _worst_received(loaded: Loaded) -> float:
    """Bytes into the link of a host, by those that its ranks need; the largest of all hosts."""
    needed: dict[str, int] = {}
    for host, rank in zip(loaded.hosts, loaded.report.ranks, strict=True):
        needed[host] = needed.get(host, 0) + rank.bytes_to_device
    return max(loaded.received_by(host) / num_bytes for host, num_bytes in needed.items())


def racks(found: Found, expected: Expected, *, rounds: int) -> None:
    """Two racks of two hosts, uplinks of a quarter of a link, storage in the first rack.

    With tp=2 each gang is kept in a rack, so that both racks need everything: that is for running the model, and no
    sooner loaded than any other way. With pp=2 awareness is for the load: copies of a stage in one rack need half.
    """
    two_racks = in_two_racks(
        nic_bytes_per_s=NIC_BYTES_PER_S, oversubscribed=8.0, storage_bytes_per_s=STORAGE_BYTES_PER_S
    )
    assert two_racks.storage is not None
    topology = with_head(replace(two_racks, storage=replace(two_racks.storage, rack=_STORAGE_RACK)))
    everywhere, gangs = "racks: dp=4", "racks: tp=2 dp=2"
    aware, blind = "racks: pp=2 dp=2", "racks: pp=2 dp=2, topology-blind"
    mesh = mm.Parallel(pp=2, dp=2)
    for number in range(_MOST_BEDS):
        with Session(topology, expected) as session:
            server = session.bed.serve(expected.checkpoint.folder, rack=_STORAGE_RACK)
            orders = {
                everywhere: Order(uri=server.uri, parallel=mm.Parallel(dp=4)),
                gangs: Order(uri=server.uri, parallel=mm.Parallel(tp=2, dp=2)),
                aware: Order(uri=server.uri, parallel=mesh),
                blind: Order(uri=server.uri, parallel=mesh, settings=_BLIND),
            }
            # Ray's ids of nodes are random, and with them what a placement does that does not look at racks.
            if number < _MOST_BEDS - 1 and _is_lucky(session, orders[blind]):
                say(f"{blind}: copies of a stage are in one rack by chance; once more with other nodes")
                continue
            loads = load_in_turns(found, session, orders, topology, server=server, rounds=rounds)
            break
    for case in (everywhere, gangs, aware):
        storage_row(found, case, loads[case], expected)
        into = [_needed_beyond(loaded, orders[case].parallel, expected) for loaded in loads[case]]
        found.row(f"{case}: bytes into r1 / bytes needed there", into, target=1.1)
        back = [loaded.moved.uplinks["r0"].received_bytes / expected.checkpoint.nbytes for loaded in loads[case]]
        found.row(f"{case}: bytes into r0 (it needs none) / checkpoint", back)
    torn = [float(_gangs_apart(loaded, orders[gangs].parallel)) for loaded in loads[gangs]]
    found.row(f"{gangs}: gangs torn over racks", torn, "gangs", target=0)
    ratios = _ratios(loads[blind], loads[aware])
    found.row("racks: seconds with topology-blind placement / topology-aware", ratios, target=1.5, better="higher")


def _is_lucky(session: Session, order: Order) -> bool:
    """Whether ranks that need the same bytes are in the same rack though nobody looked; not if it cannot be told."""
    try:
        hosts = session.load(order).hosts
    except LoadFailed as error:
        say(f"topology-blind: {error}")
        return False
    half = order.parallel.world // 2  # stages come first in the order of ranks
    return len({host[:2] for host in hosts[:half]}) == 1


def _gangs_apart(loaded: Loaded, parallel: mm.Parallel) -> int:
    """How many gangs lie in both racks."""
    firsts = range(0, parallel.world, parallel.tp)
    return sum(len({host[:2] for host in loaded.hosts[first : first + parallel.tp]}) > 1 for first in firsts)


def _needed_beyond(loaded: Loaded, parallel: mm.Parallel, expected: Expected) -> float:
    inside = [rank.rank for host, rank in zip(loaded.hosts, loaded.report.ranks, strict=True) if host.startswith("r1")]
    return loaded.moved.uplinks["r1"].received_bytes / expected.bytes_of(parallel, inside)


def _ratios(over: Sequence[Loaded], under: Sequence[Loaded]) -> list[float]:
    """Seconds of one by those of the other, round by round."""
    return [one.transfer_s / other.transfer_s for one, other in zip(over, under, strict=False)]
