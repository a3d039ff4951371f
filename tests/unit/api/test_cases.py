"""Cases to compare, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamind_ray.api.cases import parse_case, sweep_meshes
from megamind_ray.api.whatif import Case
from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import RequestError
from megamind_ray.planning import preset

BASE = Case(label="base", parallel=Parallel(tp=4), topology=preset("4x-rtx-4090"), config=Config())


def test_axes_that_are_not_named_stay_as_they_are() -> None:
    case = parse_case("pp=2", BASE)

    assert case.parallel == Parallel(tp=4, pp=2)
    assert case.topology is BASE.topology
    assert case.label == "pp=2"


def test_hardware_and_mesh_change_together() -> None:
    case = parse_case("tp=8, topology=hgx-h100", BASE)

    assert case.parallel == Parallel(tp=8)
    assert case.topology == preset("hgx-h100")


def test_any_setting_can_be_compared() -> None:
    case = parse_case("io.read_threads=32,io.extent_bytes=64MiB,placement=first_fit,keep=yes", BASE)

    assert case.config.io.read_threads == 32
    assert case.config.io.extent_bytes == 64 << 20
    assert case.config.placement.policy == "first_fit"
    assert case.keep


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp", "is none of"),
        ("", "is none of"),
        ("speed=9", "is none of"),
        ("tp=many", "must be a number of ranks"),
        ("tp=1e3", "must be a number of ranks"),
        ("tp=0", "integer of 1 or more"),
        ("keep=maybe", "must be yes or no"),
        ("placement=worst_fit", "worst_fit"),
        ("topology=hgx-h900", "hgx-h900"),
        ("io.speed=3", "no setting io.speed"),
        ("io.read_threads=0", "io.read_threads"),
        ("oi.read_threads=1", "no section 'oi'"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        parse_case(text, BASE)


def test_a_sweep_has_all_powers_of_two_that_the_hardware_holds() -> None:
    meshes = sweep_meshes(["tp", "pp"], Parallel(), 4)

    assert meshes == [Parallel(tp=tp, pp=pp) for tp, pp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))]


def test_a_sweep_leaves_other_axes_alone() -> None:
    assert sweep_meshes(["tp"], Parallel(pp=2), 8) == [Parallel(tp=tp, pp=2) for tp in (1, 2, 4)]


@pytest.mark.parametrize("axes", [[], ["gpus"], ["tp", ""]])
def test_a_sweep_over_what_is_no_axis_is_refused(axes: list[str]) -> None:
    with pytest.raises(RequestError, match="axes are tp, pp, dp, ep"):
        sweep_meshes(axes, Parallel(), 8)


def test_a_sweep_that_no_mesh_is_in_is_refused() -> None:
    with pytest.raises(RequestError, match="no mesh of at most 4 ranks"):
        sweep_meshes(["tp"], Parallel(pp=8), 4)


def test_a_topology_file_is_named_by_its_path(tmp_path: Path) -> None:
    from megamind_ray.planning import dump_topology

    path = tmp_path / "mine.toml"
    path.write_text(dump_topology(preset("1x-rtx-4090")))

    assert parse_case(f"tp=1,topology={path}", BASE).topology == preset("1x-rtx-4090")
