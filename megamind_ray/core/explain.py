"""A plan in words: where one tensor goes, and why."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megamind_ray.errors import RequestError, listed
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from megamind_ray.core.demands import Int64Array
    from megamind_ray.core.plan import Plan

__all__ = ["explain_tensor"]

_MOST_READS = 12


def explain_tensor(plan: Plan, name: str) -> str:
    """Says where a tensor goes and why: its placement and rule, who holds what, who reads its bytes and by which route.

    Args:
        plan: The plan.
        name: Name in the module, of a tied tensor either one, or a name on disk.

    Raises:
        RequestError: The plan has no such tensor; the message lists the nearest names.
    """
    tensors = _find(plan, name)
    return "\n\n".join("\n".join(_paragraph(plan, tensor, name)) for tensor in tensors)


def _find(plan: Plan, name: str) -> list[int]:
    """Tensors with that name in the module, else those that a tensor with that name on disk is part of."""
    names: list[str] = plan.tables["tensors"]["name"].to_pylist()
    if name in names:
        return [names.index(name)]
    views = plan.tables["views"]
    tied: list[str] = views["name"].cast(pa.string()).to_pylist()
    if name in tied:
        return [int(views["tensor"][tied.index(name)].as_py())]
    if name in plan.disk_tensors:
        segments = plan.tables["segments"]
        rows = segments["disk_tensor"].to_numpy() == plan.disk_tensors.index(name)
        found: list[int] = np.unique(segments["tensor"].to_numpy()[rows]).tolist()
        if found:
            return found
        raise RequestError(
            f"tensor {name!r} is in the checkpoint, but no rank needs bytes of it (is it empty, or left out?)"
        )
    near = difflib.get_close_matches(name, dict.fromkeys([*names, *tied, *plan.disk_tensors]), n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(near)}" if near else f"it has {len(names)} others, such as {names[:1]}"
    raise RequestError(f"the plan has no tensor {name!r}; {hint}")


def _paragraph(plan: Plan, tensor: int, asked: str) -> Iterator[str]:
    row = plan.tables["tensors"].slice(tensor, 1).to_pylist()[0]
    yield f"{row['name']}: {row['dtype']} {_shape(row['shape'])}, {format_bytes(row['nbytes'])}"
    if asked != row["name"]:
        yield f"  asked for as {asked}"
    yield f"  placement: {row['placement']}"
    yield f"  why: {row['reason']}"
    yield from _holders(plan, tensor)
    yield from _reads(plan, tensor)


def _holders(plan: Plan, tensor: int) -> Iterator[str]:
    views = plan.tables["views"]
    rows = views.filter(pc.equal(views["tensor"], tensor)).to_pylist()
    ranks = plan.tables["ranks"].to_pylist()
    held = [row for row in rows if not row["alias"]]
    aliases = sorted({row["name"] for row in rows if row["alias"]})
    yield f"  held by {len(held)} of {_count(len(ranks), 'rank')}:"
    for row in held:
        at = ranks[row["rank"]]
        yield (
            f"    rank {row['rank']} (pp={at['pp']} dp={at['dp']} tp={at['tp']}) on {at['node']}:{at['gpu']}: "
            f"{_shape(row['shape'])}, {format_bytes(row['nbytes'])} at arena offset {row['offset']}"
        )
    if aliases:
        yield f"    also under the name {', '.join(aliases)} (the same bytes)"
    yield "  why these GPUs:"
    for reason, members in _by_reason(ranks[row["rank"]] for row in held):
        yield f"    {_ranks(members)}: {reason}"


def _by_reason(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank["reason"], []).append(rank["rank"])
    return list(found.items())


def _reads(plan: Plan, tensor: int) -> Iterator[str]:
    segments, blocks = plan.tables["segments"], plan.tables["blocks"]
    rows = np.flatnonzero(segments["tensor"].to_numpy() == tensor)
    if not len(rows):
        yield "  no bytes to read"
        return
    block, consumers = (segments[name].to_numpy()[rows] for name in ("block", "consumers"))
    nbytes = (segments["run_bytes"].to_numpy() * segments["num_runs"].to_numpy())[rows]
    extents = np.unique(blocks["extent"].to_numpy()[np.unique(block)])
    sources = [plan.disk_tensors[i] for i in np.unique(segments["disk_tensor"].to_numpy()[rows])]
    pieces = f"{_count(len(extents), 'extent')}, {_count(len(np.unique(block)), 'block')}"
    yield f"  on disk as {listed(sources, 3)}, in {pieces}:"
    paths = plan.tables["files"]["path"].to_pylist()
    for extent in extents[:_MOST_READS].tolist():
        yield from _read(plan, extent, _Pieces(block, consumers, nbytes), paths)
    if len(extents) > _MOST_READS:
        yield f"    and {len(extents) - _MOST_READS} more extents"


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Segments of a tensor: block, set of ranks, bytes."""

    block: Int64Array
    consumers: Int64Array
    nbytes: Int64Array


def _read(plan: Plan, extent: int, pieces: _Pieces, paths: list[str]) -> Iterator[str]:
    row = plan.tables["extents"].slice(extent, 1).to_pylist()[0]
    reader = f"rank {row['rank']} on {row['node']}" if row["rank"] >= 0 else f"the agent of {row['node']}"
    yield f"    extent {extent}: {paths[row['file']]} [{row['begin']}, {row['end']}), {row['route']}, read by {reader}"
    yield f"      because {row['reason']}"
    pairs = plan.tables["consumers"]
    for item in sorted(set(pieces.block.tolist())):
        entry = plan.tables["blocks"].slice(item, 1).to_pylist()[0]
        if entry["extent"] == extent:
            here = pieces.block == item
            members = pairs.filter(pc.is_in(pairs["consumers"], pa.array(pieces.consumers[here])))
            ranks = sorted(set(members["rank"].to_pylist()))
            own = format_bytes(int(pieces.nbytes[here].sum()))
            yield f"      block {item} ({format_bytes(entry['nbytes'])}, {own} of this tensor) for {_ranks(ranks)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_numbers(ranks)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _numbers(values: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``'0-2, 5'``."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(values)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _shape(shape: list[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
