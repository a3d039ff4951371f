"""What people and scripts want to know of a manifest or a plan, as small plain records.

Both can be large (92,000 tensors, 750,000 segments); a summary has a row per file, dtype, rank or reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Coords
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.errors import masked

__all__ = [
    "DTypeShare",
    "FileShare",
    "ManifestSummary",
    "PlacementShare",
    "PlanSummary",
    "RankShare",
    "ReadShare",
    "ReferenceSummary",
    "summarize_manifest",
    "summarize_plan",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeShare:
    """How much of a checkpoint is stored as one dtype."""

    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShare:
    """One file of a checkpoint."""

    path: str
    size_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSummary:
    """Where trusted checksums come from."""

    origin: str
    chunk_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSummary:
    """A checkpoint at a glance.

    Attributes:
        num_bytes: Bytes of all tensors, without headers.
        num_parameters: Elements as stored; packed formats count their containers.
        dtypes: Largest share first.
        tied: Names absent on disk -> the name whose bytes they share.
        reference: None without a sidecar.
    """

    uri: str
    model_type: str | None
    num_tensors: int
    num_parameters: int
    num_bytes: int
    header_bytes: int
    dtypes: tuple[DTypeShare, ...]
    files: tuple[FileShare, ...]
    tied: Mapping[str, str]
    reference: ReferenceSummary | None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"schema": "megamind.inspect/1", **asdict(self)}


def summarize_manifest(manifest: Manifest) -> ManifestSummary:
    """Counts what a manifest holds."""
    by_dtype: dict[str, list[int]] = {}
    per_file = [0] * len(manifest.files)
    for tensor in manifest.tensors.values():
        counts = by_dtype.setdefault(tensor.dtype.label, [0, 0, 0])
        counts[0] += 1
        counts[1] += tensor.num_elements
        counts[2] += tensor.nbytes
        per_file[tensor.file] += 1
    reference = manifest.reference
    return ManifestSummary(
        uri=masked(manifest.uri),
        model_type=manifest.model_type,
        num_tensors=len(manifest.tensors),
        num_parameters=manifest.num_parameters,
        num_bytes=manifest.nbytes,
        header_bytes=manifest.header_bytes,
        dtypes=tuple(
            DTypeShare(dtype=dtype, num_tensors=tensors, num_parameters=elements, num_bytes=nbytes)
            for dtype, (tensors, elements, nbytes) in sorted(by_dtype.items(), key=lambda item: (-item[1][2], item[0]))
        ),
        files=tuple(
            FileShare(path=masked(file.path), size_bytes=file.size_bytes, num_tensors=count)
            for file, count in zip(manifest.files, per_file, strict=True)
        ),
        tied=dict(manifest.tied),
        reference=None
        if reference is None
        else ReferenceSummary(
            origin=reference.origin,
            chunk_bytes=reference.chunk_bytes,
            num_chunks=sum(len(file.chunks_crc32) for file in reference.files),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank of a plan: where it goes and what it will hold."""

    rank: int
    coords: Coords
    node: str
    gpu: int
    num_tensors: int
    arena_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """What one reader reads by one route.

    Attributes:
        route: ``direct`` or ``pool``.
        node: Where it is read.
        rank: The reading rank of the direct route, None for the node's agent.
        num_extents: Contiguous reads.
        num_bytes: Their bytes.
    """

    route: str
    node: str
    rank: int | None
    num_extents: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementShare:
    """Module tensors that are placed alike; ``num_bytes`` counts each tensor once."""

    placement: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan at a glance; the byte counts are those of ``Plan`` and ``LoadReport``."""

    uri: str
    parallel: Mapping[str, int]
    chunk_bytes: int
    keep: bool
    bytes_total: int
    bytes_from_storage: int
    bytes_to_device: int
    bytes_replicated: int
    pool_need_bytes: Mapping[str, int]
    ranks: tuple[RankShare, ...]
    reads: tuple[ReadShare, ...]
    placements: tuple[PlacementShare, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"schema": "megamind.plan-summary/1", **asdict(self)}


def summarize_plan(plan: Plan) -> PlanSummary:
    """Adds up a plan's tables by rank, reader and placement."""
    return PlanSummary(
        uri=masked(plan.uri),
        parallel=asdict(plan.parallel),
        chunk_bytes=plan.chunk_bytes,
        keep=plan.keep,
        bytes_total=plan.bytes_total,
        bytes_from_storage=plan.bytes_from_storage,
        bytes_to_device=plan.bytes_to_device,
        bytes_replicated=plan.bytes_replicated,
        pool_need_bytes=dict(plan.pool_need_bytes),
        ranks=_ranks(plan),
        reads=_reads(plan.tables["extents"]),
        placements=_placements(plan.tables["tensors"]),
        notes=plan.notes,
    )


def _ranks(plan: Plan) -> tuple[RankShare, ...]:
    counted = plan.tables["views"].group_by("rank").aggregate([("tensor", "count")])
    num_tensors = dict(zip(counted["rank"].to_pylist(), counted["tensor_count"].to_pylist(), strict=True))
    return tuple(
        RankShare(
            rank=row["rank"],
            coords=Coords(row["pp"], row["dp"], row["tp"]),
            node=row["node"],
            gpu=row["gpu"],
            num_tensors=num_tensors.get(row["rank"], 0),
            arena_bytes=row["arena_bytes"],
            reason=row["reason"] or "",
        )
        for row in plan.tables["ranks"].to_pylist()
    )


def _reads(extents: pa.Table) -> tuple[ReadShare, ...]:
    rows = pa.table(
        {
            "route": extents["route"].cast(pa.string()),
            "node": extents["node"].cast(pa.string()),
            "rank": extents["rank"],
            "nbytes": pc.subtract(extents["end"], extents["begin"]),
        }
    )
    sums = rows.group_by(["route", "node", "rank"]).aggregate([("nbytes", "sum"), ("nbytes", "count")])
    shares = (
        ReadShare(
            route=row["route"],
            node=row["node"],
            rank=row["rank"] if row["route"] == DIRECT else None,
            num_extents=row["nbytes_count"],
            num_bytes=row["nbytes_sum"],
        )
        for row in sums.to_pylist()
    )
    return tuple(sorted(shares, key=lambda share: (share.route, share.node, -1 if share.rank is None else share.rank)))


def _placements(tensors: pa.Table) -> tuple[PlacementShare, ...]:
    rows = pa.table({"placement": tensors["placement"].cast(pa.string()), "nbytes": tensors["nbytes"]})
    sums = rows.group_by("placement").aggregate([("nbytes", "sum"), ("nbytes", "count")])
    shares = (
        PlacementShare(placement=row["placement"] or "", num_tensors=row["nbytes_count"], num_bytes=row["nbytes_sum"])
        for row in sums.to_pylist()
    )
    return tuple(sorted(shares, key=lambda share: (-share.num_bytes, share.placement)))
