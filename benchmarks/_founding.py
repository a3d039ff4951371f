"""The founding figure, 671B parameters onto eight A100 in 222 s: what that hardware allows, predicted from shapes.

DeepSeek-V3 as int4 is loaded on the machine that the project was first specified for, as fp8 it does not fit, and with
overflow to host memory it does; then what more such machines reach, each with the checkpoint on its own disks. Nothing
here was measured on such machines: every second is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks._result import Measurement
from megamind_ray.api.shapes import open_shapes
from megamind_ray.api.whatif import Case, Study
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.outcome import Outcome
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Topology
from megamind_ray.errors import CapacityError
from megamind_ray.planning import build_demands, preset
from megamind_ray.planning.overflow import plan_overflow

__all__ = ["founding_rows"]

_MODEL = "deepseek-v3"
_CLAIMED_S, _LIMIT_RATIO = 222.0, 1.1
_MAX_FLOWS = 100_000  # of several machines: a minute for all of them
# One instance over all nodes, and as many as fit, for each number of nodes; int4 fits one node, fp8 two.
_MESHES = {
    2: (Parallel(tp=8, pp=2), Parallel(tp=8, dp=2), Parallel(tp=16)),
    8: (Parallel(tp=8, pp=8), Parallel(tp=8, pp=2, dp=4), Parallel(tp=8, dp=8), Parallel(tp=8, pp=4, dp=2)),
    64: (Parallel(tp=8, pp=32, dp=2), Parallel(tp=8, pp=2, dp=32), Parallel(tp=8, dp=64), Parallel(tp=8, pp=8, dp=8)),
}


def founding_rows(*, quick: bool = False) -> tuple[list[Measurement], dict[str, str]]:
    """Rows, and by case what bounds it or why it does not fit, in words."""
    rows: list[Measurement] = []
    words: dict[str, str] = {}
    machine = preset("founding")
    int4, fp8 = open_shapes(_MODEL, weights="int4"), open_shapes(_MODEL)
    rows += _one_machine(int4, machine, words)
    rows += _too_large(fp8, machine, words)
    for num_nodes in (2,) if quick else (2, 8, 64):
        for weights, manifest in (("int4", int4), ("fp8", fp8)):
            rows += _several(weights, manifest, _copies(machine, num_nodes), words)
    return rows, words


def _one_machine(manifest: Manifest, machine: Topology, words: dict[str, str]) -> Iterator[Measurement]:
    limit_s = manifest.nbytes / machine.nodes[0].disk_bytes_per_s
    name = "founding figure, 671B int4 on 8 A100, predicted"
    yield Measurement(name=f"{name}: what its disks allow", unit="s", samples=[limit_s])
    outcome = Study(manifest).outcome(_case("int4", Parallel(tp=8), machine))
    if outcome.seconds is None:
        raise RuntimeError(f"the int4 model does not fit the founding machine: {outcome.problem}")
    words["int4, one machine"] = outcome.bottleneck
    yield Measurement(name=name, unit="s", samples=[outcome.seconds], target=_CLAIMED_S)
    yield Measurement(
        name=f"{name} / what its disks allow", unit="ratio", samples=[outcome.seconds / limit_s], target=_LIMIT_RATIO
    )


def _too_large(manifest: Manifest, machine: Topology, words: dict[str, str]) -> Iterator[Measurement]:
    parallel = Parallel(tp=8)
    try:
        Study(manifest).plan(_case("fp8", parallel, machine))
    except CapacityError as error:
        words["fp8, one machine"] = str(error)
        missing_bytes = error.missing_bytes
    else:
        raise RuntimeError("671 GB fit 640 GB: the plan is wrong")
    yield Measurement(name="671B fp8 on 8 A100: missing on each GPU", unit="bytes", samples=[missing_bytes])
    overflow = plan_overflow(manifest, build_demands(manifest, parallel), machine, config=Config())
    name = "671B fp8 on 8 A100, overflow to host memory"
    yield Measurement(name=f"{name}: in the pool", unit="bytes", samples=[overflow.host_bytes])
    yield Measurement(name=f"{name}: streamed once, predicted", unit="s", samples=[overflow.pass_s])
    if overflow.token_s is not None:
        yield Measurement(name=f"{name}: for one token, predicted", unit="s", samples=[overflow.token_s])


def _several(weights: str, manifest: Manifest, machines: Topology, words: dict[str, str]) -> Iterator[Measurement]:
    num_nodes = len(machines.nodes)
    study = Study(manifest, max_flows=_MAX_FLOWS)
    outcomes = [study.outcome(_case(str(mesh), mesh, machines)) for mesh in _MESHES[num_nodes]]
    fitting = [outcome for outcome in outcomes if outcome.seconds is not None]
    for title, chosen in (
        ("fastest", fitting),
        ("fastest that fills all GPUs with replicas", [outcome for outcome in fitting if outcome.parallel.dp > 1]),
    ):
        if chosen:
            best = min(chosen, key=_seconds)
            name = f"671B {weights} on {num_nodes} machines, 200GbE: {title} ({best.case}), predicted"
            words[name] = best.bottleneck
            yield Measurement(name=name, unit="s", samples=[_seconds(best)])


def _seconds(outcome: Outcome) -> float:
    assert outcome.seconds is not None
    return outcome.seconds


def _case(label: str, parallel: Parallel, topology: Topology) -> Case:
    return Case(label=label, parallel=parallel, topology=topology, config=Config())


def _copies(machine: Topology, num_nodes: int) -> Topology:
    (node,) = machine.nodes
    nodes = tuple(replace(node, id=NodeId(f"n{index}")) for index in range(num_nodes))
    return replace(machine, nodes=nodes, name=f"{num_nodes} x {machine.name}")
