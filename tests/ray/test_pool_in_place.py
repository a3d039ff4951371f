"""Blocks of the pool are found in shared memory, where a device's registry can page-lock them."""

from __future__ import annotations

import numpy as np
import ray

import megamind_ray as mm
from megamind_ray.device.host_registry import HostRegistry
from megamind_ray.device.mappings import shared_mapping
from megamind_ray.testing.fake_device import FakeHostRuntime

MIB = 1 << 20


def test_a_block_is_a_read_only_view_of_shared_memory(cluster: mm.Cluster) -> None:
    block = ray.get(ray.put(np.ones(8 * MIB, np.uint8)), timeout=60)
    begin = block.ctypes.data

    mapping = shared_mapping(begin, begin + block.nbytes)

    assert not block.flags.writeable
    assert mapping is not None
    assert mapping.end - mapping.begin > block.nbytes


def test_the_next_block_at_the_same_place_needs_no_registration(cluster: mm.Cluster) -> None:
    runtime = FakeHostRuntime()
    registry = HostRegistry(runtime, max_bytes=1 << 30)
    calls = []
    for number in range(3):
        block = ray.get(ray.put(np.full(8 * MIB, number, np.uint8)), timeout=60)
        held = registry.hold(block)
        assert registry.counts.staged_bytes == 0
        for piece in held.pieces:
            assert runtime.may_copy(block.ctypes.data + piece.begin, block.ctypes.data + piece.end)
        held.release()
        calls.append(runtime.num_calls)
        place = block.ctypes.data
        del block, held
    assert place
    assert len(runtime.registered) == calls[-1]  # none twice, none failed
