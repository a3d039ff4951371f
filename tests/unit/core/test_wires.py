"""Which wire a load takes, by what was asked for, what there is and what was measured."""

from __future__ import annotations

import pytest

from megamind_ray.core.topology import Links, Topology
from megamind_ray.core.wires import Ceilings, choose_wire, known_ceilings, with_wire
from megamind_ray.errors import RequestError


def ceilings(ray: float, nixl: float) -> Ceilings:
    return Ceilings(ray_bytes_per_s=ray, nixl_bytes_per_s=nixl, origin="measured")


@pytest.mark.parametrize(
    ("ray", "nixl", "wire"),
    [(1e9, 5e9, "nixl"), (1e9, 1.2e9, "nixl"), (1e9, 1.19e9, "ray"), (1e9, 0.5e9, "ray")],
    ids=["faster", "just fast enough", "hardly faster", "slower"],
)
def test_nixl_is_taken_where_it_was_measured_clearly_faster(ray: float, nixl: float, wire: str) -> None:
    choice = choose_wire("auto", lacking="", ceilings=ceilings(ray, nixl), faster=1.2)

    assert choice.wire == wire
    assert choice.ceiling_bytes_per_s == {"ray": ray, "nixl": nixl}[wire]
    assert "where wire.faster asks for 1.2 (measured)" in choice.reason


def test_without_figures_or_without_nixl_it_is_rays_object_store() -> None:
    assert choose_wire("auto", lacking="", ceilings=None, faster=1.2).wire == "ray"
    lacking = choose_wire("auto", lacking="nixl is not installed", ceilings=ceilings(1.0, 9.0), faster=1.2)
    assert (lacking.wire, lacking.reason, lacking.ceiling_bytes_per_s) == ("ray", "nixl is not installed", 1.0)


def test_what_is_asked_for_is_taken_whatever_was_measured() -> None:
    slow = ceilings(5e9, 1e9)
    assert choose_wire("nixl", lacking="", ceilings=slow, faster=1.2).ceiling_bytes_per_s == 1e9
    assert choose_wire("nixl", lacking="", ceilings=None, faster=1.2).wire == "nixl"
    assert choose_wire("ray", lacking="", ceilings=ceilings(1e9, 5e9), faster=1.2).ceiling_bytes_per_s == 1e9


def test_nixl_that_is_asked_for_and_missing_is_the_callers_mistake() -> None:
    with pytest.raises(RequestError, match=r"nixl is not installed; `pip install megamind-ray\[rdma\]` on every node"):
        choose_wire("nixl", lacking="nixl is not installed", ceilings=None, faster=1.2)


def test_a_plan_counts_with_the_ceiling_of_the_wire_that_was_chosen() -> None:
    links = Links(wire_bytes_per_s=1.0, ray_bytes_per_s=2.0, nixl_bytes_per_s=4.0)
    topology = Topology(nodes=(), links=links)
    choice = choose_wire("auto", lacking="", ceilings=known_ceilings(links, "a file"), faster=1.2)

    assert with_wire(topology, choice).links.wire_bytes_per_s == 4.0
    unknown = choose_wire("auto", lacking="", ceilings=None, faster=1.2)
    assert with_wire(topology, unknown) == topology


def test_one_figure_alone_is_none() -> None:
    assert known_ceilings(Links(ray_bytes_per_s=2.0), "a file") is None
