"""``mm.simulate``: a plan, saved or not, says how long it takes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.api.simulate import run_simulation
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Host, Node, Topology
from megamind_ray.planning import dump_topology
from megamind_ray.testing.handmade import write_llama
from megamind_ray.units import GIB


def make_topology(disk: float) -> Topology:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(2))
    disks = (Disk(name="nvme0", bytes_per_s=disk),)
    host = Host(call_s=0.0, put_s=0.0)
    return Topology(
        nodes=(Node(id=NodeId("n0"), gpus=gpus, memory_bytes=GIB, pool_bytes=GIB // 2, disks=disks, host=host),),
        name="one node",
    )


@pytest.fixture
def plan(tmp_path: Path) -> mm.Plan:
    return mm.plan(str(write_llama(tmp_path / "llama")), mm.Parallel(tp=2), make_topology(disk=1e6))


def test_a_plan_carries_its_topology(plan: mm.Plan) -> None:
    report = mm.simulate(plan)
    assert report.kind == "simulation"
    assert report.utilisation["disks of n0"] > 0.5
    assert report.seconds["total"] >= plan.bytes_from_storage / 1e6


def test_a_plan_that_was_saved_gives_the_same_report(plan: mm.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    again = mm.Plan.load(tmp_path / "plan")
    assert again.topology == plan.topology == dump_topology(make_topology(disk=1e6))
    first, second = (mm.simulate(item) for item in (plan, again))
    assert replace(first, started_at="") == replace(second, started_at="")


def test_a_plan_of_an_earlier_release_is_read_and_needs_a_topology(plan: mm.Plan, tmp_path: Path) -> None:
    old = replace(plan, topology="")
    old.save(tmp_path / "plan")
    text = (tmp_path / "plan" / "plan.json").read_text()
    shorter = [line for line in text.splitlines() if '"topology"' not in line and '"is_referenced"' not in line]
    (tmp_path / "plan" / "plan.json").write_text("\n".join(shorter))
    again = mm.Plan.load(tmp_path / "plan")
    assert again == old
    with pytest.raises(mm.RequestError, match="give the topology that the plan was made for"):
        mm.simulate(again)
    assert mm.simulate(again, make_topology(disk=1e6)).seconds == mm.simulate(plan).seconds


def test_another_disk_can_be_tried_without_planning_again(plan: mm.Plan, tmp_path: Path) -> None:
    path = tmp_path / "faster.toml"
    path.write_text(dump_topology(make_topology(disk=4e6)))
    assert mm.simulate(plan, path).seconds["total"] < mm.simulate(plan).seconds["total"] / 2


def test_a_plan_for_no_hardware_in_particular_is_simulated_on_what_it_was_made_for(tmp_path: Path) -> None:
    plan = mm.plan(str(write_llama(tmp_path / "llama")), mm.Parallel(tp=2))
    assert [rank.node for rank in mm.simulate(plan).ranks] == ["node0", "node0"]


def test_a_simulation_has_a_timeline_and_a_log(plan: mm.Plan) -> None:
    simulation = run_simulation(plan)
    assert simulation.timeline.origin == "predicted"
    assert simulation.timeline.end_s <= simulation.report.seconds["total"]
    assert simulation.events.release == mm.__version__


def test_a_report_of_a_simulation_comes_back_from_json(plan: mm.Plan) -> None:
    report = mm.simulate(plan)
    assert mm.LoadReport.from_json(report.to_json()) == report


def test_simulating_imports_neither_ray_nor_torch(plan: mm.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    code = (
        "import sys, megamind_ray as mm\n"
        f"mm.simulate(mm.Plan.load({str(tmp_path / 'plan')!r}))\n"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
