"""Which blocks come to a node, where it could keep them, as readers change."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megamind_ray.actors.rerouting import Routes
from megamind_ray.core.ids import ExtentId, NodeId
from megamind_ray.core.instructions import ReadInstead
from megamind_ray.core.parallel import Parallel
from megamind_ray.planning.capacity import comes_to
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fleet_cases import Layout, plan_of

N0, N1 = NodeId("n0"), NodeId("n1")


def test_a_block_comes_to_its_reader_and_to_those_who_need_it(tmp_path: Path) -> None:
    """Each of two stages is read by its own node; one extent of the first by the other node, and then not any more."""
    plan = plan_of(llama_checkpoint(tmp_path / "llama", num_layers=4), Layout(Parallel(pp=2), 1))
    only_first = np.flatnonzero(comes_to(plan, N0) & ~comes_to(plan, N1))
    extent = ExtentId(int(plan.tables["blocks"]["extent"][int(only_first[0])].as_py()))
    blocks = np.flatnonzero(plan.tables["blocks"]["extent"].to_numpy() == extent)
    routes = Routes(plan)

    sources = routes.give(ReadInstead(node=N1, extents=(extent,)), [N0, N1])
    assert sources == {N0: (N1,)}
    assert comes_to(routes.plan, N0)[blocks].all()
    assert comes_to(routes.plan, N1)[blocks].all()

    assert routes.give(ReadInstead(node=N0, extents=(extent,)), [N0, N1]) == {}
    assert not comes_to(routes.plan, N1)[blocks].any()
