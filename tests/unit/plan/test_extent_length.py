from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology
from megamind_ray.planning.extent_length import extent_lengths
from megamind_ray.planning.presets import preset
from megamind_ray.units import MIB

CHUNK_BYTES = 8 * MIB


def _lengths(topology: Topology, num_ranks: int, io: IoConfig | None = None, *, keep: bool = False) -> tuple[int, int]:
    config = Config(io=io or IoConfig())
    return extent_lengths(topology, np.zeros(num_ranks, np.int64), config, CHUNK_BYTES, remote=False, keep=keep)


@pytest.fixture
def fast() -> Topology:
    """A host whose disks bring 32 MiB in 2 ms."""
    return preset("founding")


def _with_disks(topology: Topology, factor: float) -> Topology:
    (node,) = topology.nodes
    disks = tuple(replace(disk, bytes_per_s=disk.bytes_per_s * factor) for disk in node.disks)
    return replace(topology, nodes=(replace(node, disks=disks),))


def test_many_ranks_on_fast_disks_get_longer_extents_through_the_pool_and_no_others(fast: Topology) -> None:
    through_pool, own = _lengths(fast, 8)
    assert own == 32 * MIB
    assert through_pool in (64 * MIB, 128 * MIB)


def test_slow_disks_leave_them_as_they_are(fast: Topology) -> None:
    assert _lengths(_with_disks(fast, 0.05), 8) == (32 * MIB, 32 * MIB)


def test_they_grow_with_disks_and_ranks_up_to_four_times(fast: Topology) -> None:
    by_ranks = [_lengths(fast, ranks)[0] for ranks in (1, 4, 8, 64)]
    by_disks = [_lengths(_with_disks(fast, factor), 8)[0] for factor in (0.1, 0.5, 1, 2, 100)]
    assert by_ranks == sorted(by_ranks)
    assert by_disks == sorted(by_disks)
    assert by_disks[-1] == 4 * 32 * MIB


def test_what_is_set_holds(fast: Topology) -> None:
    assert _lengths(fast, 8, IoConfig(pool_extent_bytes=16 * MIB)) == (16 * MIB, 32 * MIB)
    assert _lengths(fast, 8, IoConfig(pool_extent_bytes=512 * MIB, extent_bytes=64 * MIB)) == (512 * MIB, 64 * MIB)


def test_four_of_them_fit_the_smallest_pool(fast: Topology) -> None:
    (node,) = fast.nodes
    small = replace(fast, nodes=(replace(node, pool_bytes=128 * MIB),))
    through_pool, own = _lengths(small, 8)
    assert through_pool == own <= 32 * MIB
    assert through_pool % CHUNK_BYTES == 0
    assert _lengths(small, 8, keep=True)[0] <= through_pool


def test_what_a_host_without_ranks_reads_fits_its_pool_too(fast: Topology) -> None:
    (node,) = fast.nodes
    host = replace(node, id=NodeId("host"), gpus=(), switches=(), pool_bytes=128 * MIB)
    ranks = np.zeros(8, np.int64)
    two = replace(fast, nodes=(node, host))
    room = 96 * MIB  # that blocks may take on the host
    for keep in (False, True):
        for readers in (np.array([1]), np.array([0, 1])):
            lengths = extent_lengths(two, ranks, Config(), CHUNK_BYTES, remote=False, keep=keep, readers=readers)
            assert max(lengths) <= room // 4


def test_an_extent_is_at_least_a_chunk(fast: Topology) -> None:
    (node,) = fast.nodes
    tiny = replace(fast, nodes=(replace(node, pool_bytes=MIB),))
    assert _lengths(tiny, 8) == (CHUNK_BYTES, CHUNK_BYTES)


def test_each_thread_of_the_agents_finds_room_for_one_in_the_pool(fast: Topology) -> None:
    (node,) = fast.nodes
    threads = IoConfig().for_agent(node.host.cores).read_threads
    tight = replace(fast, nodes=(replace(node, pool_bytes=threads * 32 * MIB),))
    assert _lengths(tight, 8)[0] == 32 * MIB
    two = replace(fast, nodes=tuple(replace(node, id=NodeId(name), pool_bytes=3 * threads * 64 * MIB) for name in "ab"))
    alone = replace(two, nodes=two.nodes[:1])
    config = Config()
    ranks = np.repeat([0, 1], 8)
    shared, _ = extent_lengths(two, ranks, config, CHUNK_BYTES, remote=False, keep=False)
    assert shared <= _lengths(alone, 8)[0], "blocks of other nodes need room, too"
