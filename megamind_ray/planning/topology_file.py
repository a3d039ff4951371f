"""Topology files: TOML in, ``Topology`` out, and back (schema: docs/design/0003).

A topology that was read from a running cluster is written with its optional fields (``index``, ``address``, ``rack``,
``free``), and comes back equal.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import SCHEMA, Disk, Gpu, Links, Nic, Node, Storage, Topology
from megamind_ray.errors import RequestError
from megamind_ray.units import parse_bytes, parse_rate

__all__ = ["dump_topology", "load_topology", "parse_topology"]


def load_topology(path: str | Path) -> Topology:
    """Reads a topology file.

    Raises:
        RequestError: It cannot be read, or has an unknown key or a value that is not allowed; the message says where.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"topology file {path}: cannot be read ({error}); give the path of a TOML file") from error
    return parse_topology(text, origin=str(path))


def parse_topology(text: str, *, origin: str) -> Topology:
    """Reads the text of a topology file.

    Args:
        text: TOML.
        origin: Where the text comes from, for messages.

    Raises:
        RequestError: It is not TOML, or has an unknown key or a value that is not allowed; the message says where.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"topology file {origin}: not TOML ({error})") from error
    top = _Table.of(document, f"topology file {origin}", ("schema", "name", "storage", "nodes", "links"))
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise RequestError(f"{top.where}: schema is {found!r}; this release reads schema = {SCHEMA!r}")
    nodes = tuple(node for table in top.tables("nodes", required=True) for node in _nodes(table))
    links = top.table("links", ("nvlink",))
    storage = top.table("storage", ("rate", "shared"))
    return Topology(
        nodes=nodes,
        name=top.text("name"),
        links=Links() if links is None else Links(nvlink_bytes_per_s=links.rate("nvlink", Links().nvlink_bytes_per_s)),
        storage=None if storage is None else Storage(bytes_per_s=storage.rate("rate"), shared=storage.flag("shared")),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table with its place, whose keys are all known."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, values: object, where: str, keys: tuple[str, ...]) -> _Table:
        if not isinstance(values, Mapping):
            raise RequestError(f"{where}: {values!r} must be a table with the keys {', '.join(keys)}")
        for key in values:
            if key not in keys:
                raise RequestError(f"{where}: unknown key {key!r}; there are {', '.join(keys)}")
        return cls(values, where)

    def table(self, key: str, keys: tuple[str, ...]) -> _Table | None:
        return _Table.of(self.values[key], f"{self.where}: [{key}]", keys) if key in self.values else None

    def tables(self, key: str, *, required: bool = False) -> list[_Table]:
        found = self.values.get(key, [])
        if not isinstance(found, list) or (required and not found):
            raise RequestError(
                f"{self.where}: write at least one [[{key}]] table"
                if required
                else f"{self.where}: {key} must be tables, [[{key}]]"
            )
        return [
            _Table.of(values, f"{self.where}: {key}[{position}]", _KEYS[key]) for position, values in enumerate(found)
        ]

    def text(self, key: str, default: str | None = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise RequestError(
                f"{self.where}: {key} = {value!r} must be a text"
                if key in self.values
                else f"{self.where}: {key} is missing"
            )
        return value

    def integer(self, key: str, default: int | None, *, at_least: int = 0) -> int | None:
        value = self.values.get(key, default)
        if key in self.values and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
            raise RequestError(f"{self.where}: {key} = {value!r:.40} must be an integer of {at_least} or more")
        if value is not None and value > _MAX_INTEGER:
            raise RequestError(f"{self.where}: {key} = {value} is more than {_MAX_INTEGER}; correct it")
        return None if value is None else int(value)

    def count(self) -> int:
        return self.integer("count", 1, at_least=1) or 1

    def flag(self, key: str) -> bool:
        value = self.values.get(key, True)
        if not isinstance(value, bool):
            raise RequestError(f"{self.where}: {key} = {value!r} must be true or false")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        if key not in self.values and default is not None:
            return default
        return parse_bytes(self._present(key, "a size like '80GiB'"), what=f"{self.where}: {key}")

    def rate(self, key: str, default: float | None = None) -> float:
        if key not in self.values and default is not None:
            return default
        return parse_rate(self._present(key, "a rate like '25GB/s'"), what=f"{self.where}: {key}")

    def _present(self, key: str, what: str) -> Any:
        if key not in self.values:
            raise RequestError(f"{self.where}: {key} is missing; give {what}")
        return self.values[key]


# More of anything than the largest cluster has; a typing error should not fill the memory with nodes.
_MAX_INTEGER = 65536
_KEYS: Mapping[str, tuple[str, ...]] = {
    "nodes": ("name", "count", "memory", "pool", "address", "rack", "gpus", "disks", "nics"),
    "gpus": ("index", "count", "memory", "free", "numa", "nvlink_group", "pcie"),
    "disks": ("name", "rate"),
    "nics": ("name", "rate"),
}


def _nodes(table: _Table) -> list[Node]:
    """One ``[[nodes]]`` table: ``count`` identical nodes, ``n0``, ``n0-1``, ..."""
    gpus: list[Gpu] = []
    for entry in table.tables("gpus"):
        gpus.extend(_gpus(entry, first_index=gpus[-1].index + 1 if gpus else 0))
    name = table.text("name", default=None)
    node = Node(
        id=NodeId(name),
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        memory_bytes=table.size("memory"),
        pool_bytes=table.size("pool"),
        disks=tuple(Disk(name=d.text("name", None), bytes_per_s=d.rate("rate")) for d in table.tables("disks")),
        nics=tuple(Nic(name=n.text("name", None), bytes_per_s=n.rate("rate")) for n in table.tables("nics")),
        address=table.text("address"),
        rack=table.text("rack") if "rack" in table.values else None,
    )
    if node.pool_bytes > node.memory_bytes:
        raise RequestError(f"{table.where}: pool is larger than memory; the object store is part of host memory")
    return [node, *(replace(node, id=NodeId(f"{name}-{copy}")) for copy in range(1, table.count()))]


def _gpus(table: _Table, *, first_index: int) -> list[Gpu]:
    memory = table.size("memory")
    free = table.size("free", memory)
    if free > memory:
        raise RequestError(f"{table.where}: free is larger than memory; leave it out where all is free")
    first = table.integer("index", first_index) or 0
    gpu = Gpu(
        index=first,
        memory_bytes=memory,
        free_bytes=free,
        numa=table.integer("numa", None),
        nvlink_group=table.integer("nvlink_group", None),
        pcie_bytes_per_s=table.rate("pcie", Gpu(index=0, memory_bytes=0, free_bytes=0).pcie_bytes_per_s),
    )
    return [replace(gpu, index=first + step) for step in range(table.count())]


def dump_topology(topology: Topology) -> str:
    """The TOML text of a topology; ``parse_topology`` gives it back equal. Sizes are in bytes, rates in bytes/s."""
    lines = [f"schema = {_value(SCHEMA)}", f"name = {_value(topology.name)}"]
    if topology.storage is not None:
        lines += ["", "[storage]", *_pairs(rate=topology.storage.bytes_per_s, shared=topology.storage.shared)]
    for node in topology.nodes:
        lines += ["", "[[nodes]]", *_node_lines(node)]
    lines += ["", "[links]", *_pairs(nvlink=topology.links.nvlink_bytes_per_s)]
    return "\n".join(lines) + "\n"


def _node_lines(node: Node) -> Iterable[str]:
    yield from _pairs(name=node.id, address=node.address or None, rack=node.rack)
    yield from _pairs(memory=node.memory_bytes, pool=node.pool_bytes)
    # Equal GPUs with consecutive indices become one entry with a count.
    for alike, members in groupby(
        enumerate(node.gpus), key=lambda item: replace(item[1], index=item[1].index - item[0])
    ):
        run = [gpu for _, gpu in members]
        yield "[[nodes.gpus]]"
        yield from _pairs(
            index=run[0].index,
            count=len(run),
            memory=alike.memory_bytes,
            free=alike.free_bytes,
            numa=alike.numa,
            nvlink_group=alike.nvlink_group,
            pcie=alike.pcie_bytes_per_s,
        )
    for disk in node.disks:
        yield from ("[[nodes.disks]]", *_pairs(name=disk.name, rate=disk.bytes_per_s))
    for nic in node.nics:
        yield from ("[[nodes.nics]]", *_pairs(name=nic.name, rate=nic.bytes_per_s))


def _pairs(**values: object) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]


def _value(value: object) -> str:
    # A TOML basic string has the escapes of JSON, but for DEL, which TOML wants escaped and JSON does not.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
