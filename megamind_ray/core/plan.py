"""A plan: every transfer of a load, as Arrow tables. Pure data; it is made in ``planning`` and rendered in ``report``.

Tables (one row per ...):

- ``files``: data file. ``tensors``: module tensor. ``ranks``: rank of the mesh.
- ``views``: tensor that a rank holds, with its place in the rank's arena.
- ``extents``: contiguous read from storage. ``blocks``: object cut from an extent for the ranks of some nodes.
- ``consumers``: (set of ranks, rank). ``segments``: strided piece of a block, for some of the block's ranks.

How they hang together, and where checksums are made: docs/design/0004.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megamind_ray.core.ids import NodeId
from megamind_ray.core.output_file import write_output
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import RequestError

__all__ = ["DIRECT", "POOL", "SCHEMA", "TABLES", "Plan"]

SCHEMA = "megamind.plan/2"
DIRECT = "direct"
POOL = "pool"

_I32, _I64, _TEXT = pa.int32(), pa.int64(), pa.string()
_WORD = pa.dictionary(pa.int32(), pa.string())

TABLES: Mapping[str, pa.Schema] = {
    "files": pa.schema(
        [("file", _I32), ("path", _TEXT), ("size_bytes", _I64), ("mtime_ns", _I64), ("data_begin", _I64)]
    ),
    "tensors": pa.schema(
        [
            ("tensor", _I32),
            ("name", _TEXT),
            ("dtype", _WORD),
            ("shape", pa.list_(_I64)),
            ("nbytes", _I64),
            ("placement", _WORD),
            ("reason", _WORD),
            ("replicated", pa.bool_()),
        ]
    ),
    "ranks": pa.schema(
        [
            ("rank", _I32),
            ("pp", _I32),
            ("dp", _I32),
            ("tp", _I32),
            ("node", _WORD),
            ("gpu", _I32),
            ("arena_bytes", _I64),
            ("reason", _TEXT),
        ]
    ),
    "views": pa.schema(
        [
            ("rank", _I32),
            ("tensor", _I32),
            ("name", _WORD),
            ("alias", pa.bool_()),
            ("shape", pa.list_(_I64)),
            ("offset", _I64),
            ("nbytes", _I64),
        ]
    ),
    "extents": pa.schema(
        [
            ("extent", _I32),
            ("file", _I32),
            ("begin", _I64),
            ("end", _I64),
            ("route", _WORD),
            ("node", _WORD),
            ("rank", _I32),  # the reader of a direct extent, -1 else
            ("reason", _WORD),
        ]
    ),
    "blocks": pa.schema([("block", _I32), ("extent", _I32), ("nbytes", _I64), ("consumers", _I32)]),
    "consumers": pa.schema([("consumers", _I32), ("rank", _I32)]),
    "segments": pa.schema(
        [
            ("block", _I32),
            ("tensor", _I32),
            ("disk_tensor", _I32),
            ("consumers", _I32),
            ("block_offset", _I64),
            ("src_offset", _I64),  # absolute in the file
            ("run_bytes", _I64),
            ("num_runs", _I64),
            ("src_stride_bytes", _I64),
            ("dst_offset", _I64),  # in the view
            ("dst_stride_bytes", _I64),
        ]
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every transfer of a load.

    Attributes:
        uri: The checkpoint.
        root: Folder of its files.
        parallel: The mesh.
        chunk_bytes: The chunk grid.
        tables: By name, see the module's docstring; row ``i`` of a table with an id has id ``i``.
        disk_tensors: Names on disk, in the manifest's order.
        bytes_total: Distinct bytes demanded.
        bytes_to_device: Bytes written into arenas, summed over ranks.
        pool_need_bytes: Per node, the bytes of all blocks that pass through its pool.
        keep: Whether blocks stay in the pool.
        is_referenced: Whether chunks are held to recorded checksums as they are read.
        topology: The hardware that it was made for, as the text of a topology file; empty where that is not known.
        line: Nodes in the order in which they hand blocks on to each other; empty: each hands to all by itself.
        notes: What a reader of the plan should know (replication, what cannot be kept), in words.
    """

    uri: str
    root: str
    parallel: Parallel
    chunk_bytes: int
    tables: Mapping[str, pa.Table]
    disk_tensors: tuple[str, ...]
    bytes_total: int
    bytes_to_device: int
    pool_need_bytes: Mapping[str, int] = field(default_factory=dict)
    keep: bool = False
    is_referenced: bool = False
    topology: str = ""
    line: tuple[NodeId, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes_replicated(self) -> int:
        """Bytes in arenas beyond one copy of each demanded byte."""
        return self.bytes_to_device - self.bytes_total

    @property
    def bytes_from_storage(self) -> int:
        """Bytes that the extents read."""
        extents = self.tables["extents"]
        return int((extents["end"].to_numpy() - extents["begin"].to_numpy()).sum())

    def save(self, path: str | Path) -> None:
        """Writes the plan as a folder of Parquet files and one ``plan.json``.

        Raises:
            RequestError: The path exists and is not an empty folder, or it cannot be written.
        """
        folder = Path(path)
        header = {name: getattr(self, name) for name in _HEADER} | {
            "schema": SCHEMA,
            "parallel": asdict(self.parallel),
            "pool_need_bytes": dict(self.pool_need_bytes),
        }
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise RequestError(f"{folder}: exists already; give a new or an empty folder for the plan")
            folder.mkdir(parents=True, exist_ok=True)
            for name, table in self.tables.items():
                with (folder / f"{name}.parquet").open("wb") as file:  # as in _read_table
                    pq.write_table(table, file)
            # Last: a folder without it is no plan.
            write_output(folder / "plan.json", json.dumps(header, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"{folder}: the plan cannot be written ({error}); give another folder") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what ``save`` wrote.

        Raises:
            RequestError: There is no plan, one of another schema, or one that is damaged.
        """
        folder = Path(path)
        try:
            header = json.loads((folder / "plan.json").read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"{folder}: no plan there ({error}); make one with Plan.save") from error
        schema = header.get("schema") if isinstance(header, dict) else None
        if schema != SCHEMA:
            raise RequestError(f"{folder}: schema {schema!r}, this release reads {SCHEMA!r}; plan again")
        try:
            header = _DEFAULTS | header
            values = {name: _checked(header[name], kind, name) for name, kind in _HEADER.items()}
            values |= {name: tuple(header[name]) for name in ("disk_tensors", "line", "notes")}
            return cls(
                tables={name: _read_table(folder / f"{name}.parquet").cast(kind) for name, kind in TABLES.items()},
                parallel=Parallel(**header["parallel"]),
                pool_need_bytes=_checked(header["pool_need_bytes"], dict, "pool_need_bytes"),
                **values,
            )
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise RequestError(f"{folder}: the plan is damaged ({error}); plan again") from error

    def explain(self, tensor: str) -> str:
        """Says in words where a tensor goes and why.

        Args:
            tensor: Name in the module, or on disk.

        Raises:
            RequestError: The plan has no such tensor; the message lists the nearest names.
        """
        from megamind_ray.core.explain import explain_tensor

        return explain_tensor(self, tensor)


def _checked(value: Any, kind: type, name: str) -> Any:
    """A value of ``plan.json``; lists are of texts, numbers are not negative."""
    ok = type(value) is kind
    if isinstance(value, list):
        ok = ok and all(isinstance(item, str) for item in value)
    elif isinstance(value, int):
        ok = ok and value >= 0
    if not ok:
        raise ValueError(f"{name} in plan.json is {value!r:.40}")
    return value


_HEADER: Mapping[str, type] = {
    "uri": str,
    "root": str,
    "chunk_bytes": int,
    "disk_tensors": list,
    "bytes_total": int,
    "bytes_to_device": int,
    "keep": bool,
    "is_referenced": bool,
    "topology": str,
    "line": list,
    "notes": list,
}
# What plans of earlier releases lack.
_DEFAULTS: Mapping[str, Any] = {"is_referenced": False, "topology": "", "line": []}


def _read_table(path: Path) -> pa.Table:
    # Opened here: Arrow refuses paths that are not UTF-8.
    with path.open("rb") as file:
        return pq.read_table(file)
