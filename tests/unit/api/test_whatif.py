"""Layouts and hardware side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamind_ray.api.shapes import open_shapes
from megamind_ray.api.whatif import Case, Study
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Storage, Topology
from megamind_ray.planning import preset

SMALL = Case(label="tp=4", parallel=Parallel(tp=4), topology=preset("4x-rtx-4090"), config=Config())


@pytest.fixture(scope="module")
def llama() -> Study:
    return Study(open_shapes("llama-3-8b"))


def test_a_case_that_fits_has_a_time_and_what_bounds_it(llama: Study) -> None:
    outcome = llama.outcome(SMALL)

    assert outcome.fits
    assert outcome.seconds is not None
    assert outcome.lower_bound_s is not None
    assert outcome.seconds >= outcome.lower_bound_s > 0
    assert outcome.bottleneck
    assert outcome.bytes_from_storage == pytest.approx(16.06e9, rel=0.01)


def test_a_case_that_does_not_fit_says_why(llama: Study) -> None:
    outcome = llama.outcome(replace(SMALL, parallel=Parallel(dp=8)))

    assert not outcome.fits
    assert outcome.seconds is None
    assert "needs 8 GPUs" in outcome.problem


@pytest.mark.parametrize(("storage", "readers"), [(None, {"n0"}), (Storage(bytes_per_s=10e9), {"n0", "n1"})])
def test_nodes_without_disks_read_only_what_is_on_storage_that_all_share(
    llama: Study, storage: Storage | None, readers: set[str]
) -> None:
    (node,) = preset("4x-rtx-4090").nodes
    nodes = (replace(node, id=NodeId("n0")), replace(node, id=NodeId("n1"), disks=()))
    case = replace(SMALL, parallel=Parallel(tp=8), topology=Topology(nodes=nodes, storage=storage))

    assert set(llama.plan(case).tables["extents"]["node"].to_pylist()) == readers


def test_the_nearest_layout_is_one_that_can_be_planned(llama: Study) -> None:
    wrong = replace(SMALL, parallel=Parallel(tp=3), label="tp=3")

    nearest = llama.nearest(wrong)

    assert nearest is not None
    assert nearest.parallel in (Parallel(tp=4), Parallel(tp=2))
    assert llama.outcome(nearest).fits


def test_there_is_no_near_layout_where_nothing_fits() -> None:
    study = Study(open_shapes("llama-3-70b"))

    assert study.nearest(replace(SMALL, parallel=Parallel(tp=1))) is None


def test_overflow_is_planned_for_a_mesh_that_does_not_fit() -> None:
    study = Study(open_shapes("llama-3-70b"))

    plan = study.overflow(SMALL)

    assert plan.host_bytes > 0
    assert all(rank.device_bytes + rank.slot_bytes <= 22 << 30 for rank in plan.ranks)
