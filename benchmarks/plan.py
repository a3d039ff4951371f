"""Time and peak memory of planning DeepSeek-V3 (671B parameters, 91,991 tensors) from headers alone.

Each mesh is planned in a process of its own, so that its peak is its own. ``--quick`` plans one mesh once.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks._result import Measurement, parse_arguments, write_result
from benchmarks.deepseek_shape import write_checkpoint
from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Topology
from megamind_ray.io.checkpoint import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_agent, compile_rank, load_topology

_NODE = Path(__file__).parent.parent / "examples" / "topologies" / "two_nodes_of_eight_h100.toml"
_MESHES = (Parallel(tp=8, pp=2), Parallel(tp=8, pp=8), Parallel(tp=8, pp=4, dp=2, ep=16))
# "In seconds and under 1 GiB of memory."
_TARGET_S, _TARGET_BYTES = 10.0, 1 << 30
_Result = TypeVar("_Result")


def plan_once(folder: str, parallel: Parallel) -> dict[str, float]:
    """Opens, plans and compiles; seconds by phase, and the process's peak memory and the plan's rows."""
    measured: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], _Result]) -> _Result:
        begin = time.perf_counter()
        result = work()
        measured[phase] = time.perf_counter() - begin
        return result

    manifest = timed("open", lambda: open_manifest(folder))
    demands = timed("demands", lambda: build_demands(manifest, parallel))
    topology = _topology(-(-parallel.world // 8))
    plan = timed("plan", lambda: build_plan(manifest, demands, topology, config=Config()))
    measured["total"] = sum(measured.values())
    load, none = LoadId("deepseek-v3#1"), np.zeros(0, np.int64)

    def compile_all() -> None:
        for rank in parallel.ranks:
            compile_rank(plan, manifest, Rank(rank), load)
        for node in topology.nodes:
            compile_agent(plan, manifest, node.id, load, credit_bytes=1 << 30, keep_blocks=none)

    timed("compile", compile_all)
    measured["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    measured["segments"] = len(plan.tables["segments"])
    return measured


def _topology(num_nodes: int) -> Topology:
    node = load_topology(_NODE).nodes[0]
    nodes = tuple(dataclasses.replace(node, id=NodeId(f"n{index}")) for index in range(num_nodes))
    return Topology(nodes=nodes, name=f"{num_nodes} nodes")


def measure(folder: str, parallel: Parallel, repeats: int) -> list[Measurement]:
    """Rows of one mesh."""
    samples = []
    for _ in range(repeats):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            samples.append(pool.apply(plan_once, (folder, parallel)))
    rows = [
        Measurement(
            name=f"{parallel}: {phase}",
            unit="s",
            samples=[sample[phase] for sample in samples],
            target=_TARGET_S if phase == "total" else None,
        )
        for phase in ("open", "demands", "plan", "total", "compile")
    ]
    peak = [sample["peak"] for sample in samples]
    segments = [sample["segments"] for sample in samples]
    return [
        *rows,
        Measurement(name=f"{parallel}: peak memory", unit="bytes", samples=peak, target=_TARGET_BYTES),
        Measurement(name=f"{parallel}: segments", unit="rows", samples=segments),
    ]


def main() -> None:
    """Runs the benchmark."""
    arguments = parse_arguments(__doc__)
    meshes = _MESHES[:1] if arguments.quick else _MESHES
    repeats = 1 if arguments.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        rows = [row for parallel in meshes for row in measure(folder, parallel, repeats)]
    write_result(
        "plan",
        rows,
        config={"checkpoint": "deepseek-v3 shape", "meshes": [str(mesh) for mesh in meshes], "repeats": repeats},
        arguments=arguments,
    )
    if any(row.passed is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
