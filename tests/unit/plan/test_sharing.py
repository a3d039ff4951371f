"""Sharing out reading: who reads how much, so that the busiest resource is done early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Nic, Node, Rack, Storage, Topology
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.transfers import transfer_costs
from megamind_ray.policies.costs import Float64Array, TransferCosts
from megamind_ray.policies.sharing import Busy, NodeClass, can_share, share_out

GB = 10**9


def costs_of(
    *disks_and_nics: tuple[float, float], racks: str = "", uplink: float = 1.0, storage_rack: str | None = None
) -> TransferCosts:
    """Nodes by the GB/s of their disks and networks; a letter of ``racks`` for each. Without disks there is storage."""
    nodes = tuple(
        Node(
            id=NodeId(f"n{index}"),
            gpus=(),
            memory_bytes=1,
            pool_bytes=1,
            disks=(Disk(name="d", bytes_per_s=disk * GB),) if disk else (),
            nics=(Nic(name="n", bytes_per_s=nic * GB),),
            rack=racks[index] if racks else None,
        )
        for index, (disk, nic) in enumerate(disks_and_nics)
    )
    uplinks = tuple(Rack(name=name, uplink_bytes_per_s=uplink * GB) for name in sorted(set(racks)))
    storage = None if disks_and_nics[0][0] else Storage(bytes_per_s=GB, rack=storage_rack)
    return transfer_costs(CostModel(Topology(nodes=nodes, racks=uplinks, storage=storage)))


def shared(costs: TransferCosts, nbytes: float, *, need: list[float] | None = None) -> tuple[list[float], float]:
    """GB that each node reads of a class of all nodes, and the busiest resource's seconds."""
    members = np.arange(len(costs.read))
    busy = Busy.idle(costs)
    each = np.ones(len(members)) if need is None else np.array(need)
    (share,) = share_out(costs, busy, [NodeClass(members, nbytes * GB, each)])
    return (share / GB).tolist(), busy.seconds


def test_disks_finish_together() -> None:
    share, seconds = shared(costs_of((1, 100), (3, 100)), 8)
    assert share == pytest.approx([2, 6], rel=1e-6)
    assert seconds == pytest.approx(2)


def test_what_a_slow_network_cannot_take_in_is_read_there() -> None:
    # The second node takes in 1 GB/s, and reads as much as that leaves.
    share, seconds = shared(costs_of((5, 100), (5, 0.5)), 8)
    assert seconds == pytest.approx(8)
    assert share == pytest.approx([4, 4], rel=1e-3)


def test_a_node_that_needs_a_part_takes_in_no_more() -> None:
    _, all_of_it = shared(costs_of((10, 1), (10, 1)), 8)
    _, half = shared(costs_of((10, 1), (10, 1)), 8, need=[0.5, 0.5])
    assert half == pytest.approx(all_of_it / 2, rel=1e-3)


def test_a_slow_uplink_makes_each_rack_read_its_part() -> None:
    # Two nodes in rack x, one in y: what x reads leaves once, what y reads enters x once, and is handed on inside.
    costs = costs_of((1, 100), (1, 100), (1, 100), racks="xxy", uplink=0.5)
    share, seconds = shared(costs, 9)
    inside, outside = share[0] + share[1], share[2]
    assert seconds == pytest.approx(max(inside, outside) / 0.5, rel=1e-3)
    assert seconds == pytest.approx(9, rel=1e-3)


def test_at_an_end_of_the_line_a_node_reads_more_as_it_hands_nothing_on() -> None:
    # The one in the middle hands on all that the others read, and would send what it reads itself to both sides.
    costs = costs_of((100, 1), (100, 1), (100, 1))
    share, seconds = shared(costs, 8)
    middle = int(np.argsort(costs.line)[1])
    assert share[middle] == pytest.approx(0, abs=0.05)
    assert seconds == pytest.approx(8, rel=1e-2)


def test_nodes_in_the_rack_of_the_storage_read_what_others_would_send_back_to_them() -> None:
    share, seconds = shared(costs_of((0, 9), (0, 9), racks="xy", uplink=0.5, storage_rack="x"), 8)
    assert seconds == pytest.approx(16, rel=1e-3)  # all has to get into the other rack
    assert share[0] > 4 * share[1]


def test_storage_outside_of_the_racks_fills_the_uplink_of_each() -> None:
    _, seconds = shared(costs_of((0, 9), (0, 9), racks="xy", uplink=0.5), 8)
    assert seconds == pytest.approx(16, rel=1e-3)


def test_shared_storage_takes_as_long_whoever_reads() -> None:
    _, seconds = shared(costs_of((0, 100), (0, 100)), 8)
    assert seconds == pytest.approx(8)


def test_a_class_makes_room_for_one_with_less_choice() -> None:
    costs = costs_of((1, 100), (1, 100), (1, 100))
    busy = Busy.idle(costs)
    pair = NodeClass(np.array([0, 1]), 4.0 * GB, np.ones(2))
    everyone = NodeClass(np.array([0, 1, 2]), 5.0 * GB, np.ones(3))
    share_out(costs, busy, [pair, everyone])
    assert busy.seconds == pytest.approx(3, rel=1e-3)


def test_room_is_filled_before_time_counts() -> None:
    costs = costs_of((1, 100), (1, 100))
    item = NodeClass(np.array([0, 1]), 6.0 * GB, np.ones(2))
    (share,) = share_out(costs, Busy.idle(costs), [item], np.array([1.0 * GB, 9.0 * GB]))
    assert (share / GB).tolist() == pytest.approx([1, 5], rel=1e-6)


def test_beyond_all_room_only_time_counts() -> None:
    costs = costs_of((1, 100), (1, 100))
    item = NodeClass(np.array([0, 1]), 6.0 * GB, np.ones(2))
    (share,) = share_out(costs, Busy.idle(costs), [item], np.array([1.0 * GB, 0.0]))
    assert (share / GB).tolist() == pytest.approx([3, 3], rel=1e-6)


def test_what_cannot_be_shared_out_in_time_is_seen_at_a_glance() -> None:
    costs, item = costs_of((1, 100), (3, 100)), NodeClass(np.array([0, 1]), 8.0 * GB, np.ones(2))
    assert can_share(costs, Busy.idle(costs), [item], 2.01)
    assert not can_share(costs, Busy.idle(costs), [item], 1.99)


def seconds_of(costs: TransferCosts, item: NodeClass, share: Float64Array) -> float:
    busy = Busy.idle(costs)
    busy.add(costs, item, share)
    return busy.seconds


@given(
    rates=st.lists(st.tuples(st.sampled_from([0.5, 1, 4]), st.sampled_from([0.5, 1, 20])), min_size=2, max_size=4),
    racks=st.lists(st.sampled_from("xy"), min_size=4, max_size=4),
    uplink=st.sampled_from([0.3, 2.0]),
    storage_rack=st.sampled_from([None, "x", "elsewhere"]),
    has_disks=st.booleans(),
    data=st.data(),
)
def test_no_other_way_to_share_one_class_is_sooner(
    rates: list[tuple[float, float]],
    racks: list[str],
    uplink: float,
    storage_rack: str | None,
    has_disks: bool,
    data: st.DataObject,
) -> None:
    rates = [(disk * has_disks, nic) for disk, nic in rates]
    costs = costs_of(*rates, racks="".join(racks[: len(rates)]), uplink=uplink, storage_rack=storage_rack)
    each = st.sampled_from([0.25, 0.5, 1.0])
    need = np.array(data.draw(st.lists(each, min_size=len(rates), max_size=len(rates))))
    item = NodeClass(np.arange(len(rates)), 10.0 * GB, need)
    (share,) = share_out(costs, Busy.idle(costs), [item])
    assert share.sum() == pytest.approx(item.nbytes)
    assert (share >= 0).all()
    parts = data.draw(st.lists(st.integers(0, 10), min_size=len(rates), max_size=len(rates)).filter(any))
    other = item.nbytes * np.array(parts) / sum(parts)
    assert seconds_of(costs, item, share) <= seconds_of(costs, item, other) * (1 + 1e-6)
