"""Tables for a terminal or a text file: rich renderables from manifests, plans, reports and topologies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megamind_ray.core.report import LoadReport, RankReport, Verified
from megamind_ray.core.topology import Topology
from megamind_ray.core.tracks import short_node
from megamind_ray.report.folding import FoldingTable
from megamind_ray.report.summary import ManifestSummary, PlanSummary
from megamind_ray.report.terminal import printable
from megamind_ray.units import format_bytes, format_duration, format_rate

__all__ = [
    "VERIFIED_MEANING",
    "count_of",
    "manifest_tables",
    "plain_table",
    "plan_tables",
    "report_tables",
    "topology_table",
]

VERIFIED_MEANING: Mapping[Verified, str] = {
    "reference": "reference: every chunk matched a checksum recorded beforehand",
    "transit": "transit: every hop after storage was checked; what storage gave had no recorded checksum to be held to",
    "off": "off: nothing was checked",
}
# There can be hundreds of files, placements and ranks; the JSON document has all of them.
_MAX_ROWS = 40
# How much of what a rank holds came by which route: read by the rank itself, or through its node's pool.
_ROUTES = (">direct", ">pool")


def manifest_tables(summary: ManifestSummary) -> RenderableType:
    """What is in a checkpoint: totals, dtypes, files, ties."""
    facts = {
        "checkpoint": summary.uri,
        "model type": summary.model_type or "unknown (no config.json)",
        "tensors": f"{summary.num_tensors:,} in {count_of(len(summary.files), 'file')}",
        "parameters": f"{summary.num_parameters:,} as stored",
        "size": f"{format_bytes(summary.num_bytes)} ({summary.num_bytes:,} bytes)",
        "headers": format_bytes(summary.header_bytes),
        "checksums": "none recorded (`megamind verify --record` makes them)"
        if summary.reference is None
        else f"{count_of(summary.reference.num_chunks, 'chunk')} of {format_bytes(summary.reference.chunk_bytes)}"
        f" in {summary.reference.origin}",
    }
    dtypes = _table("dtype", ">tensors", ">parameters", ">bytes", ">share")
    for share in summary.dtypes:
        part = share.num_bytes / summary.num_bytes if summary.num_bytes else 0.0
        _row(
            dtypes,
            share.dtype,
            f"{share.num_tensors:,}",
            f"{share.num_parameters:,}",
            _size(share.num_bytes),
            f"{part:.1%}",
        )
    files = _table("file", ">tensors", ">size")
    for file in summary.files[:_MAX_ROWS]:
        _row(files, file.path, f"{file.num_tensors:,}", format_bytes(file.size_bytes))
    parts: list[RenderableType] = [_facts(facts), dtypes, files, *_rest(summary.files, "file")]
    if summary.tied:
        tied = _table("tied name (absent on disk)", "shares the bytes of")
        for name, target in list(summary.tied.items())[:_MAX_ROWS]:
            _row(tied, name, target)
        parts += [tied, *_rest(summary.tied, "tied name")]
    return _stack(parts)


def plan_tables(summary: PlanSummary) -> RenderableType:
    """Where each rank goes, who reads what, and what it amounts to."""
    facts = {
        "checkpoint": summary.uri,
        "mesh": _mesh(summary.parallel),
        "read from storage": f"{format_bytes(summary.bytes_from_storage)}, each byte once",
        "distinct bytes needed": format_bytes(summary.bytes_total),
        "written to devices": format_bytes(summary.bytes_to_device),
        "replicated": format_bytes(summary.bytes_replicated),
        "kept in the pool": "yes" if summary.keep else "no",
    }
    ranks = _table(">rank", "pp.dp.tp", "node", ">gpu", ">tensors", ">arena", "why there")
    above = None
    for rank in summary.ranks[:_MAX_ROWS]:
        coords = f"{rank.coords.pp}.{rank.coords.dp}.{rank.coords.tp}"
        why = "as above" if rank.reason == above else rank.reason
        above = rank.reason
        _row(ranks, rank.rank, coords, rank.node, rank.gpu, f"{rank.num_tensors:,}", _size(rank.arena_bytes), why)
    reads = _table("route", "reader", ">extents", ">bytes")
    for read in summary.reads[:_MAX_ROWS]:
        reader = f"agent of {read.node}" if read.rank is None else f"rank {read.rank} on {read.node}"
        _row(reads, read.route, reader, f"{read.num_extents:,}", _size(read.num_bytes))
    placements = _table("placement", ">tensors", ">bytes")
    for share in summary.placements[:_MAX_ROWS]:
        _row(placements, share.placement, f"{share.num_tensors:,}", _size(share.num_bytes))
    parts: list[RenderableType] = [
        _facts(facts),
        *(ranks, *_rest(summary.ranks, "rank")),
        *(reads, *_rest(summary.reads, "reader")),
        *(placements, *_rest(summary.placements, "placement")),
    ]
    if summary.pool_need_bytes:
        pools = _table("pool of node", ">bytes that pass through")
        for node, num_bytes in list(summary.pool_need_bytes.items())[:_MAX_ROWS]:
            _row(pools, node, _size(num_bytes))
        parts += [pools, *_rest(summary.pool_need_bytes, "pool")]
    return _stack([*parts, *_notes(summary.notes)])


def report_tables(report: LoadReport) -> RenderableType:
    """What a load moved, what each rank holds now, how fast it went, what it proved."""
    ranks = _table(">rank", "pp.dp.tp", ">where", ">names", ">holds", *_ROUTES, ">time", ">speed")
    for rank in report.ranks:
        _row(
            ranks,
            rank.rank,
            f"{rank.pp}.{rank.dp}.{rank.tp}",
            f"{short_node(rank.node)}:{rank.gpu}",
            f"{rank.num_tensors:,}",
            _size(rank.bytes_to_device),
            _share(rank.bytes_direct, rank.bytes_to_device),
            _share(rank.bytes_pool, rank.bytes_to_device),
            format_duration(rank.seconds.get("total", 0.0)),
            _speed(rank),
        )
    parts: list[RenderableType] = [_facts(_report_facts(report)), ranks]
    if report.faults:
        faults = _table(">at", "fault", "where", "what was done", ">read again")
        for fault in report.faults:
            at = "-" if fault.at_s is None else f"{fault.at_s:.2f} s"
            _row(faults, at, fault.kind, fault.where, fault.action, _size(fault.bytes_retried))
        parts.append(faults)
    return _stack([*parts, *_notes(report.notes)])


def topology_table(topology: Topology) -> RenderableType:
    """The nodes with their GPUs, pools and rates."""
    table = _table("node", ">GPUs", ">free of device memory", ">host memory", ">pool", ">disks", ">network")
    for node in topology.nodes:
        free_bytes = sum(gpu.free_bytes for gpu in node.gpus)
        memory_bytes = sum(gpu.memory_bytes for gpu in node.gpus)
        _row(
            table,
            node.id,
            len(node.gpus),
            f"{format_bytes(free_bytes)} of {format_bytes(memory_bytes)}",
            _size(node.memory_bytes),
            _size(node.pool_bytes),
            format_rate(node.disk_bytes_per_s) if node.disks else "-",
            format_rate(node.nic_bytes_per_s) if node.nics else "-",
        )
    return table


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> RenderableType:
    """A plain table; a column name that begins with ``>`` is aligned to the right."""
    table = _table(*columns)
    for row in rows:
        _row(table, *row)
    return table


def _report_facts(report: LoadReport) -> dict[str, str]:
    total_s = report.seconds.get("total", 0.0)
    phases = ", ".join(
        f"{name} {format_duration(seconds)}" for name, seconds in report.seconds.items() if name != "total"
    )
    retried = f", {format_bytes(report.bytes_retried)} read again" if report.bytes_retried else ""
    return {
        "model": report.model,
        "checkpoint": report.uri,
        "mesh": _mesh(report.parallel),
        "time": f"{format_duration(total_s)} ({phases})" if phases else format_duration(total_s),
        "speed": f"{format_rate(report.throughput_bytes_per_s)} from storage",
        "read from storage": f"{format_bytes(report.bytes_from_storage)} for {format_bytes(report.bytes_total)}"
        f" distinct bytes{retried}",
        "over the network": format_bytes(report.bytes_over_network),
        "written to devices": f"{format_bytes(report.bytes_to_device)}"
        f" ({format_bytes(report.bytes_replicated)} of it replicated)",
        "kept in the pool": _kept(report),
        "verified": VERIFIED_MEANING[report.verified],
        "faults": count_of(len(report.faults), "fault") if report.faults else "none",
    }


def _kept(report: LoadReport) -> str:
    kept = report.kept
    text = f"{format_bytes(kept.num_bytes)} in {count_of(kept.num_blocks, 'block')}" if kept.num_blocks else "nothing"
    if kept.bytes_not_kept:
        text += f"; {format_bytes(kept.bytes_not_kept)} not kept"
    return f"{text}: {kept.reason}" if kept.reason else text


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if part else "-"


def _speed(rank: RankReport) -> str:
    seconds = rank.seconds.get("total", 0.0)
    return format_rate(rank.bytes_to_device / seconds) if seconds > 0 else "-"


def _mesh(parallel: Mapping[str, int]) -> str:
    world = parallel.get("pp", 1) * parallel.get("dp", 1) * parallel.get("tp", 1)
    sizes = " ".join(f"{name}={size}" for name, size in parallel.items() if size > 1)
    return f"{sizes or 'tp=1'} ({count_of(world, 'rank')})"


def count_of(number: int, noun: str) -> str:
    """``1, "file"`` -> ``'1 file'``, ``2, "file"`` -> ``'2 files'``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _table(*columns: str) -> Table:
    table = FoldingTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        # Numbers are never wrapped; where there is little room, text gives way.
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _row(table: Table, *cells: object) -> None:
    # As Text: names and URIs may hold brackets that rich would read as markup.
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def _facts(facts: Mapping[str, str]) -> Table:
    grid = FoldingTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(name), Text(printable(value, keep="\n")))
    return grid


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [Text("\n".join(f"note: {note}" for note in notes))] if notes else []


def _rest(rows: Sequence[object] | Mapping[str, object], noun: str) -> list[RenderableType]:
    hidden = len(rows) - _MAX_ROWS
    return [Text(f"... and {count_of(hidden, f'more {noun}')}; --json has all of them")] if hidden > 0 else []


def _stack(parts: Sequence[RenderableType]) -> RenderableType:
    return Group(
        *(part if index == 0 else Padding(part, (1, 0, 0, 0), expand=False) for index, part in enumerate(parts))
    )
