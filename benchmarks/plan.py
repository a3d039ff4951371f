"""Planning DeepSeek-V3 (671B parameters, 91,991 tensors) from headers alone, and how good its placements are.

``--only scale``: time and peak memory from 16 to 1,024 GPUs; each mesh is planned in a process of its own, so that its
peak is its own. ``--only quality``: how near the plans of Best-Fit and its alternatives come to what no plan can beat.
``--only founding``: what the hardware of the founding figure allows, predicted. ``--only fidelity``: predicted against
measured, with a local Ray on this machine, which should have nothing else to do. ``--quick`` plans two meshes once,
compares on fewer clusters, and leaves the last two out.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks._fidelity import measure_fidelity
from benchmarks._founding import founding_rows
from benchmarks._plan_quality import exact_rows, preset_rows, random_rows
from benchmarks._result import Measurement, parse_arguments, write_result
from benchmarks.deepseek_shape import write_checkpoint
from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Topology
from megamind_ray.io.checkpoint import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_agent, compile_rank, load_topology

_NODE = Path(__file__).parent.parent / "examples" / "topologies" / "two_nodes_of_eight_h100.toml"
# Copies of one mesh: the same tensors, ever more ranks.
_GROWTH = (Parallel(tp=8, pp=2), Parallel(tp=8, pp=2, dp=4), Parallel(tp=8, pp=2, dp=16), Parallel(tp=8, pp=2, dp=64))
_OTHERS = (
    Parallel(tp=8, pp=8),
    Parallel(tp=8, pp=4, dp=2, ep=16),
    Parallel(tp=8, pp=4, dp=32),
    Parallel(tp=8, pp=16, dp=8),
    Parallel(tp=8, pp=4, dp=32, ep=256),
)
# Seconds of demands and plan together: opening the checkpoint is input, and a model known by its shapes has none.
_TARGET_S = {16: 2.0, 1024: 10.0}
_TARGET_BYTES, _TARGET_EXPONENT = 1 << 30, 1.0
_NUM_CLUSTERS, _NUM_CLUSTERS_QUICK, _NUM_SMALL, _NUM_SMALL_QUICK = 200, 20, 60, 10
_PARTS = ("scale", "quality", "founding", "fidelity")
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
    measured["demands and plan"] = measured["demands"] + measured["plan"]
    measured["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    load, none = LoadId("deepseek-v3#1"), np.zeros(0, np.int64)
    timed("compile a rank", lambda: compile_rank(plan, manifest, Rank(0), load))
    node = topology.nodes[0].id
    timed(
        "compile an agent",
        lambda: compile_agent(plan, manifest, node, load, credit_bytes=1 << 30, keep_blocks=none),
    )
    measured["segments"] = len(plan.tables["segments"])
    return measured


def _topology(num_nodes: int) -> Topology:
    node = load_topology(_NODE).nodes[0]
    nodes = tuple(dataclasses.replace(node, id=NodeId(f"n{index}")) for index in range(num_nodes))
    return Topology(nodes=nodes, name=f"{num_nodes} nodes")


def measure(folder: str, parallel: Parallel, repeats: int) -> list[dict[str, float]]:
    """Samples of one mesh."""
    samples = []
    for _ in range(repeats):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            samples.append(pool.apply(plan_once, (folder, parallel)))
    return samples


def mesh_rows(parallel: Parallel, samples: Sequence[Mapping[str, float]]) -> list[Measurement]:
    """Rows of one mesh."""

    def row(name: str, key: str, unit: str, target: float | None = None) -> Measurement:
        values = [sample[key] for sample in samples]
        return Measurement(name=f"{parallel}: {name}", unit=unit, samples=values, target=target)

    return [
        *(row(phase, phase, "s") for phase in ("open", "demands", "plan")),
        row("demands and plan", "demands and plan", "s", _TARGET_S.get(parallel.world)),
        *(row(phase, phase, "s") for phase in ("compile a rank", "compile an agent")),
        row("peak memory", "peak", "bytes", _TARGET_BYTES),
        row("segments", "segments", "rows"),
    ]


def growth_rows(by_mesh: Mapping[Parallel, Sequence[Mapping[str, float]]]) -> list[Measurement]:
    """Exponents of growth with the ranks, from the smallest mesh to the largest: 1 is linear, 0 is none."""
    meshes = [mesh for mesh in _GROWTH if mesh in by_mesh]
    if len(meshes) < 2:
        return []
    first, last = meshes[0], meshes[-1]
    rows = []
    for name, key in (("time", "demands and plan"), ("memory", "peak")):
        one, other = (statistics.median(sample[key] for sample in by_mesh[mesh]) for mesh in (first, last))
        exponent = math.log(other / one) / math.log(last.world / first.world)
        what = f"{first.world} to {last.world} GPUs: growth of {name} with ranks"
        rows.append(Measurement(name=what, unit="exponent", samples=[exponent], target=_TARGET_EXPONENT))
    return rows


def scale_rows(meshes: Sequence[Parallel], repeats: int) -> list[Measurement]:
    """Rows of all meshes, and of growth."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        by_mesh = {parallel: measure(folder, parallel, repeats) for parallel in meshes}
    rows = [row for parallel, samples in by_mesh.items() for row in mesh_rows(parallel, samples)]
    return [*rows, *growth_rows(by_mesh)]


def main() -> None:
    """Runs the benchmark."""
    only = {"choices": _PARTS, "help": "one part of the benchmark"}
    arguments = parse_arguments(__doc__, only=only)
    meshes = (_GROWTH[0], _GROWTH[-1]) if arguments.quick else (*_GROWTH, *_OTHERS)
    repeats = 1 if arguments.quick else 3
    rows: list[Measurement] = []
    parts = (arguments.only,) if arguments.only else _PARTS[:2] if arguments.quick else _PARTS
    words: dict[str, str] = {}
    if "scale" in parts:
        rows += scale_rows(meshes, repeats)
    if "quality" in parts:
        rows += [] if arguments.quick else preset_rows()
        rows += random_rows(_NUM_CLUSTERS_QUICK if arguments.quick else _NUM_CLUSTERS)
        rows += exact_rows(_NUM_SMALL_QUICK if arguments.quick else _NUM_SMALL)
    if "founding" in parts:
        found, words = founding_rows(quick=arguments.quick)
        rows += found
    if "fidelity" in parts:
        rows += measure_fidelity(rounds=1 if arguments.quick else 5, quick=arguments.quick)
    write_result(
        "plan",
        rows,
        config={
            "checkpoint": "deepseek-v3 shape",
            "meshes": [str(mesh) for mesh in meshes],
            "repeats": repeats,
            "bounds": words,
        },
        arguments=arguments,
    )
    if any(row.passed is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
