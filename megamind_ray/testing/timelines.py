"""Timelines and reports that look like those of real loads, made up from a few rates: for tests of renderings."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from megamind_ray.core.report import Fault, LoadReport, RankReport
from megamind_ray.core.timeline import Mark, Sample, Span, SpanKind, Timeline
from megamind_ray.units import MIB

__all__ = ["MadeUpLoad", "made_up_load"]

_EXTENT_BYTES = 16 * MIB
_FILE_EXTENTS = 64
_READERS = 4
_DISK_BYTES_PER_S = 2.4e9
_WIRE_BYTES_PER_S = 3.1e9
_COPY_BYTES_PER_S = 12e9
_POOL_BYTES = 4e9
_STEP_S = 0.05


@dataclass(frozen=True, kw_only=True)
class MadeUpLoad:
    """A load that never was."""

    report: LoadReport
    timeline: Timeline


@dataclass
class _Clock:
    """When each worker of each track is free again."""

    workers: dict[str, list[float]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def work(self, track: str, num_workers: int, kind: SpanKind, ready_s: float, seconds: float, label: str) -> float:
        """The next free worker does it; returns when it is done."""
        free = self.workers.setdefault(track, [0.0] * num_workers)
        worker = free.index(min(free))
        begin_s = max(ready_s, free[worker])
        free[worker] = begin_s + seconds
        self.spans.append(
            Span(track=track, kind=kind, begin_s=begin_s, end_s=free[worker], nbytes=_EXTENT_BYTES, label=label)
        )
        return free[worker]


def made_up_load(
    *,
    origin: Literal["measured", "predicted"] = "measured",
    num_nodes: int = 2,
    ranks_of_node: int = 2,
    num_extents: int = 300,
    seed: int = 0,
) -> MadeUpLoad:
    """Nodes read extents, check them, cut them into the pool and send them on; ranks copy them to their devices.

    A measured one has jitter, a slow disk for a while and a fault; a predicted one is even. The same arguments give the
    same load.
    """
    rng = random.Random(seed)
    clock = _Clock()
    held: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    clock.spans.append(Span(track="planner", kind="manifest", begin_s=0.0, end_s=0.012, label="headers"))
    clock.spans.append(Span(track="planner", kind="plan", begin_s=0.012, end_s=0.031, label="plan"))
    for extent in range(num_extents):
        _extent(clock, held, extent, num_nodes, ranks_of_node, rng if origin == "measured" else None)
    end_s = max(span.end_s for span in clock.spans)
    rates, limits = _rates(clock.spans, end_s)
    for place in held:
        limits[f"bytes {place}"] = _POOL_BYTES if place.endswith("/host") else 1.2 * _EXTENT_BYTES * num_extents
    fault = Fault(
        kind="chunk_retried",
        where="model-00002-of-00005.safetensors, chunk 17",
        action="read again from the same source; the second read had the right sum",
        bytes_retried=8 * MIB,
        at_s=0.41 * end_s,
    )
    done = [Mark(at_s=end_s, kind="rank_done", text=f"rank {rank}") for rank in range(num_nodes * ranks_of_node)]
    faults = (fault,) if origin == "measured" else ()
    marks = [Mark(at_s=0.41 * end_s, kind=fault.kind, text=f"{fault.where}: {fault.action}") for fault in faults]
    timeline = Timeline.of(origin, clock.spans, [*rates, *_amounts(held)], marks=[*marks, *done], limits=limits)
    return MadeUpLoad(report=_report(origin, num_nodes, ranks_of_node, num_extents, end_s, faults), timeline=timeline)


def _extent(
    clock: _Clock,
    held: defaultdict[str, list[tuple[float, int]]],
    extent: int,
    num_nodes: int,
    ranks_of_node: int,
    rng: random.Random | None,
) -> None:
    """One extent on its way from a disk to the devices."""

    def about(seconds: float) -> float:
        return seconds * rng.lognormvariate(0.05, 0.25) if rng else seconds

    home = extent % num_nodes
    at = 0.031
    low = extent % _FILE_EXTENTS * _EXTENT_BYTES // MIB
    label = f"model-{extent // _FILE_EXTENTS + 1:05d}.safetensors [{low} MiB, {low + _EXTENT_BYTES // MIB} MiB)"
    slow = 2.5 if rng and home == 1 and 0.5 < extent / 300 % 1 < 0.62 else 1.0
    read_s = slow * _READERS * _EXTENT_BYTES / _DISK_BYTES_PER_S
    at = clock.work(f"n{home}/storage", _READERS, "read", at, about(read_s), label)
    block = f"block {extent}"
    for kind, rate in (("verify", 12e9), ("cut", 7e9), ("put", 6e9)):
        at = clock.work(f"n{home}/pool", 2, kind, at, about(_EXTENT_BYTES / rate), block)  # type: ignore[arg-type]
    held[f"n{home}/host"].append((at, _EXTENT_BYTES))
    for step in range(num_nodes):
        node = (home + step) % num_nodes
        if step:
            at = clock.work(f"n{node}/wire", 2, "wire", at, about(2 * _EXTENT_BYTES / _WIRE_BYTES_PER_S), block)
            held[f"n{node}/host"].append((at, _EXTENT_BYTES))
        done = at
        for rank in range(node * ranks_of_node, (node + 1) * ranks_of_node):
            copied = clock.work(f"rank {rank}", 1, "copy", at, about(_EXTENT_BYTES / _COPY_BYTES_PER_S), block)
            held[f"rank {rank}/device"].append((copied, _EXTENT_BYTES))
            done = max(done, copied)
        held[f"n{node}/host"].append((done, -_EXTENT_BYTES))


def _rates(spans: list[Span], end_s: float) -> tuple[list[Sample], dict[str, float]]:
    """Throughput of disks and wires."""
    limits: dict[str, float] = {}
    counted: defaultdict[tuple[str, int], float] = defaultdict(float)
    for span in spans:
        if span.kind in ("read", "wire"):
            limits[f"bytes/s {span.track}"] = _DISK_BYTES_PER_S if span.kind == "read" else _WIRE_BYTES_PER_S
            for step in range(int(span.begin_s / _STEP_S), int(span.end_s / _STEP_S) + 1):
                inside_s = min(span.end_s, (step + 1) * _STEP_S) - max(span.begin_s, step * _STEP_S)
                counted[span.track, step] += span.nbytes * inside_s / (span.end_s - span.begin_s)
    samples = [
        Sample(series=series, at_s=step * _STEP_S, value=counted[series.removeprefix("bytes/s "), step] / _STEP_S)
        for series in limits
        for step in range(int(end_s / _STEP_S) + 1)
    ]
    return samples, limits


def _amounts(held: dict[str, list[tuple[float, int]]]) -> list[Sample]:
    samples = []
    for place, changes in held.items():
        total = 0
        for at_s, change in sorted(changes):
            total += change
            samples.append(Sample(series=f"bytes {place}", at_s=at_s, value=total))
    return samples


def _report(
    origin: str, num_nodes: int, ranks_of_node: int, num_extents: int, end_s: float, faults: tuple[Fault, ...]
) -> LoadReport:
    total = num_extents * _EXTENT_BYTES
    world = num_nodes * ranks_of_node
    return LoadReport(
        kind="load" if origin == "measured" else "simulation",
        model="made-up-8b",
        uri="/models/made-up-8b",
        parallel={"pp": 1, "dp": 1, "tp": world, "ep": 1},
        started_at="2026-01-01T00:00:00+00:00",
        bytes_total=total,
        bytes_from_storage=total,
        bytes_retried=sum(fault.bytes_retried for fault in faults),
        bytes_over_network=total * (num_nodes - 1),
        bytes_to_device=total * world,
        bytes_replicated=total * (world - 1),
        seconds={"manifest": 0.012, "plan": 0.019, "transfer": end_s - 0.031, "total": end_s},
        throughput_bytes_per_s=total / end_s,
        ranks=tuple(
            RankReport(
                rank=rank,
                pp=0,
                dp=0,
                tp=rank,
                node=f"n{rank // ranks_of_node}",
                gpu=rank % ranks_of_node,
                num_tensors=291,
                arena_bytes=total,
                bytes_to_device=total,
                bytes_pool=total,
                seconds={"wait": 0.6 * end_s, "copy": 0.4 * end_s, "total": end_s},
            )
            for rank in range(world)
        ),
        faults=faults,
        verified="reference",
        lower_bound_s=total / num_nodes / _DISK_BYTES_PER_S,
        bottleneck="the disks of n0 and n1, 2.40 GB/s each",
        utilisation={f"disks of n{node}": 0.85 for node in range(num_nodes)} | {"network in of n0": 0.35},
    )
