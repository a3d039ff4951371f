"""What a node has of wires, and how it measures them, with a NIXL of the tests' own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megamind_ray.actors.nixl_endpoint import NixlEndpoint
from megamind_ray.actors.nixl_wire import NixlWire
from megamind_ray.actors.node_wires import NodeWires, WireMeasureRequest
from megamind_ray.config import Config, WireConfig
from megamind_ray.core.wires import WireName
from megamind_ray.errors import RequestError
from megamind_ray.testing.fake_nixl import FakeFabric, SharedMemoryPlane
from megamind_ray.units import KIB, MIB

CONFIG = Config(wire=WireConfig(buffer_bytes=4 * MIB))
REQUEST = WireMeasureRequest(wires=("ray", "nixl"), block_bytes=200 * KIB, num_blocks=20, seconds=30.0, timeout_s=30.0)


class Source:
    """The other node, in this process; counts what it was asked for."""

    def __init__(self, wires: NodeWires) -> None:
        self.wires = wires
        self.asked: list[tuple[WireName, int]] = []

    def lay_out(self, wire: WireName, num_blocks: int, nbytes: int) -> Sequence[object]:
        self.asked.append((wire, num_blocks))
        return self.wires.lay_out(wire, num_blocks, nbytes, CONFIG)


class Two:
    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.store = SharedMemoryPlane(128 * MIB)
        self.source, self.target = (NodeWires(self.store, self.start) for _ in range(2))

    def start(self, config: WireConfig, pool_bytes: int) -> NixlEndpoint:
        return NixlEndpoint(buffer_bytes=config.buffer_bytes, pool_bytes=self.store.pool_bytes, start=self.fabric.start)


def test_both_wires_move_the_same_in_turns_and_the_first_round_does_not_count() -> None:
    two = Two()
    source = Source(two.source)

    ray, nixl = two.target.measure(source, REQUEST, CONFIG)

    assert (ray.wire, nixl.wire) == ("ray", "nixl")
    assert ray.num_bytes == nixl.num_bytes == 4 * 4 * 200 * KIB
    assert ray.carried
    assert nixl.carried
    assert min(ray.bytes_per_s, nixl.bytes_per_s) > 0
    assert [wire for wire, _ in source.asked] == ["ray", "nixl"] * 5
    assert two.fabric.num_reads == sum(count for wire, count in source.asked if wire == "nixl")


def test_a_measurement_that_nixl_does_not_carry_ends_at_once_and_says_so() -> None:
    two = Two()
    two.fabric.state = "ERR"
    source = Source(two.source)
    _, nixl = two.target.measure(source, REQUEST, CONFIG)
    assert not nixl.carried
    assert len(source.asked) == 2


def test_no_round_is_begun_when_the_time_is_over() -> None:
    two = Two()
    source = Source(two.source)
    ray, _ = two.target.measure(source, replace(REQUEST, seconds=1e-9), CONFIG)
    assert len(source.asked) == 4, "the first round, and one that counts"
    assert ray.num_bytes > 0


def test_blocks_that_were_measured_with_go() -> None:
    two = Two()
    two.target.measure(Source(two.source), REQUEST, CONFIG)
    assert two.source.lay_out("ray", 0, 0, CONFIG) == ()
    gc.collect()
    assert two.store.live_bytes == 0


def test_a_load_has_the_wire_that_was_chosen_for_it_and_rays_where_nixl_does_not_start() -> None:
    def cannot(config: WireConfig, pool_bytes: int) -> NixlEndpoint:
        raise RequestError("nixl is not installed")

    chosen = replace(CONFIG, wire=replace(CONFIG.wire, use="nixl"))
    two = Two()
    assert isinstance(two.target.plane(chosen, where="n"), NixlWire)
    for use in ("ray", "auto"):
        other = replace(CONFIG, wire=replace(CONFIG.wire, use=use))
        assert two.target.plane(other, where="n") is two.store
    without = NodeWires(two.store, cannot)
    assert without.lacking(CONFIG.wire) == "nixl is not installed"
    assert without.plane(chosen, where="n") is two.store


def test_nixl_is_started_once_and_only_where_it_is_wanted() -> None:
    two = Two()
    two.target.plane(CONFIG, where="n")
    assert not two.fabric.agents
    for _ in range(3):
        assert two.target.lacking(CONFIG.wire) == ""
    assert len(two.fabric.agents) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("use", "tcp"), ("faster", 0.5), ("measure_s", 0.0), ("measure_bytes", 1), ("buffer_bytes", 1)],
)
def test_settings_that_cannot_be_meant_are_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"config wire.{field} = "):
        WireConfig(**{field: value})  # type: ignore[arg-type]
