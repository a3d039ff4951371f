"""Topology files: TOML in, ``Topology`` out (schema: docs/design/0003). ``topology_dump`` goes the other way."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar, cast, get_args

from megamind_ray.config.files import read_regular
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import (
    SCHEMA,
    Disk,
    Gpu,
    GpuKind,
    Host,
    Links,
    Nic,
    Node,
    Rack,
    Storage,
    Switch,
    Topology,
)
from megamind_ray.errors import RequestError, listed
from megamind_ray.planning.toml_table import MAX_COUNT, TomlTable

__all__ = ["load_topology", "parse_topology"]

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "topology": ("schema", "name", "source", "storage", "racks", "nodes", "links"),
    "storage": ("rate", "shared", "latency", "request", "requests", "rack"),
    "racks": ("name", "count", "uplink"),
    "nodes": (
        "name",
        "count",
        "memory",
        "pool",
        "pool_taken",
        "address",
        "rack",
        "per_rack",
        "host",
        "gpus",
        "switches",
        "disks",
        "nics",
    ),
    "host": ("cores", "memory_rate", "copy", "touch", "checksum", "network", "run", "put", "call", "take"),
    "gpus": ("index", "count", "memory", "free", "kind", "numa", "nvlink_group", "pcie"),
    "switches": ("gpus", "rate"),
    "disks": ("name", "count", "rate", "latency"),
    "nics": ("name", "count", "rate", "latency"),
    "links": ("nvlink", "wire", "ray", "nixl"),
}
# A dataclass with slots has no defaults on its class.
_GPU: Final = Gpu(index=0, memory_bytes=0, free_bytes=0)
_DISK: Final = Disk(name="", bytes_per_s=1.0)
_NIC: Final = Nic(name="", bytes_per_s=1.0)
_STORAGE: Final = Storage(bytes_per_s=1.0)

Named = TypeVar("Named", Disk, Nic)


def load_topology(path: str | Path) -> Topology:
    """Reads a topology file.

    Raises:
        RequestError: It cannot be read, or has an unknown key or a value that is not allowed; the message says where.
    """
    try:
        text = read_regular(Path(path))
    except (OSError, ValueError) as error:
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
    top = TomlTable.of(document, f"topology file {origin}", _KEYS["topology"])
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise RequestError(f"{top.where}: schema is {found!r:.40}; this release reads schema = {SCHEMA!r}")
    node_tables = top.tables("nodes", _KEYS["nodes"], required=True)
    rack_tables = top.tables("racks", _KEYS["racks"])
    _require_few(top.where, node_tables, rack_tables)
    nodes = tuple(node for table in node_tables for node in _nodes(table))
    racks = tuple(rack for table in rack_tables for rack in _racks(table))
    _require_unique([rack.name for rack in racks], top.where, "racks")
    links = _links(top.table("links", _KEYS["links"]))
    storage = _storage(top.table("storage", _KEYS["storage"]))
    _require_known_rack(top.where, storage, {None, *(rack.name for rack in racks), *(node.rack for node in nodes)})
    name, source = top.text("name"), top.text("source")
    try:
        return Topology(nodes=nodes, name=name, links=links, storage=storage, racks=racks, source=source)
    except RequestError as error:
        raise RequestError(f"{top.where}: {error.message}") from error


def _require_known_rack(where: str, storage: Storage | None, known: set[str | None]) -> None:
    """A rack that is spelt otherwise would be one without a limit."""
    if storage is not None and storage.rack not in known:
        racks = sorted(name for name in known if name is not None)
        has = listed(racks) if racks else "no racks"
        raise RequestError(
            f"{where}: storage: rack is {storage.rack!r:.40}, and the file has {has}; "
            f"name the rack that the storage stands in, or leave it out where it is outside of all"
        )


def _require_few(where: str, nodes: list[TomlTable], racks: list[TomlTable]) -> None:
    """Counts multiply: what they come to is looked at before there is any of it."""
    totals = {"racks": sum(rack.count() for rack in racks), "nodes": sum(node.count() for node in nodes)}
    for key in ("gpus", "disks", "nics"):
        totals[key] = sum(node.count() * sum(entry.count() for entry in node.tables(key, _KEYS[key])) for node in nodes)
    for key, total in totals.items():
        if total > MAX_COUNT:
            raise RequestError(f"{where}: {total} {key} in all are more than {MAX_COUNT}; correct a count")


def _nodes(table: TomlTable) -> list[Node]:
    """One ``[[nodes]]`` table: ``count`` nodes ``n0``, ``n0-1``, ..., alike but for their racks."""
    gpus: list[Gpu] = []
    for entry in table.tables("gpus", _KEYS["gpus"]):
        gpus.extend(_gpus(entry, first_index=gpus[-1].index + 1 if gpus else 0))
    name = table.text("name", default=None)
    node = Node(
        id=NodeId(name),
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        memory_bytes=table.size("memory"),
        pool_bytes=table.size("pool"),
        pool_taken_bytes=table.size("pool_taken", 0),
        disks=_each(table.tables("disks", _KEYS["disks"]), _disk),
        nics=_each(table.tables("nics", _KEYS["nics"]), _nic),
        address=table.text("address"),
        rack=table.optional_text("rack"),
        switches=tuple(
            Switch(gpus=switch.integers("gpus"), bytes_per_s=switch.rate("rate"))
            for switch in table.tables("switches", _KEYS["switches"])
        ),
        host=_host(table.table("host", _KEYS["host"])),
    )
    if node.pool_bytes > node.memory_bytes:
        raise RequestError(f"{table.where}: pool is larger than memory; the object store is part of host memory")
    per_rack = table.integer("per_rack", None, at_least=1)
    if per_rack is not None and node.rack is None:
        raise RequestError(f"{table.where}: per_rack is there and rack is not; name the first of the racks")
    return [
        replace(node, id=NodeId(_numbered(name, copy)), rack=_rack_of(node.rack, copy, per_rack))
        for copy in range(table.count())
    ]


def _rack_of(rack: str | None, copy: int, per_rack: int | None) -> str | None:
    """Racks are filled one after the other, and numbered as ``[[racks]]`` with a count numbers them."""
    return rack if rack is None or per_rack is None else _numbered(rack, copy // per_rack)


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number}" if number else name


def _gpus(table: TomlTable, *, first_index: int) -> list[Gpu]:
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
        pcie_bytes_per_s=table.rate("pcie", _GPU.pcie_bytes_per_s),
        kind=cast(GpuKind, table.choice("kind", get_args(GpuKind))),
    )
    return [replace(gpu, index=first + step) for step in range(table.count())]


def _each(tables: list[TomlTable], make: Callable[[TomlTable], Named]) -> tuple[Named, ...]:
    """``count`` devices a table: ``nvme0``, ``nvme0-1``, ..."""
    found: list[Named] = []
    for table in tables:
        one = make(table)
        found += [replace(one, name=_numbered(one.name, copy)) for copy in range(table.count())]
    return tuple(found)


def _disk(table: TomlTable) -> Disk:
    return Disk(
        name=table.text("name", None),
        bytes_per_s=table.rate("rate"),
        latency_s=table.duration("latency", _DISK.latency_s),
    )


def _nic(table: TomlTable) -> Nic:
    return Nic(
        name=table.text("name", None),
        bytes_per_s=table.rate("rate"),
        latency_s=table.duration("latency", _NIC.latency_s),
    )


def _host(table: TomlTable | None) -> Host:
    host = Host()
    if table is None:
        return host
    return Host(
        cores=table.integer("cores", host.cores, at_least=1) or host.cores,
        memory_bytes_per_s=table.rate("memory_rate", host.memory_bytes_per_s),
        copy_bytes_per_s=table.rate("copy", host.copy_bytes_per_s),
        touch_bytes_per_s=table.rate("touch", host.touch_bytes_per_s),
        checksum_bytes_per_s=table.rate("checksum", host.checksum_bytes_per_s),
        network_bytes_per_s=table.rate("network", host.network_bytes_per_s),
        run_s=table.duration("run", host.run_s),
        put_s=table.duration("put", host.put_s),
        call_s=table.duration("call", host.call_s),
        take_s=table.duration("take", host.take_s),
    )


def _racks(table: TomlTable) -> list[Rack]:
    name, uplink = table.text("name", None), table.rate("uplink")
    return [Rack(name=_numbered(name, copy), uplink_bytes_per_s=uplink) for copy in range(table.count())]


def _links(table: TomlTable | None) -> Links:
    if table is None:
        return Links()
    nvlink = table.rate("nvlink", Links().nvlink_bytes_per_s)
    return Links(
        nvlink_bytes_per_s=nvlink,
        wire_bytes_per_s=table.optional_rate("wire"),
        ray_bytes_per_s=table.optional_rate("ray"),
        nixl_bytes_per_s=table.optional_rate("nixl"),
    )


def _storage(table: TomlTable | None) -> Storage | None:
    if table is None:
        return None
    return Storage(
        bytes_per_s=table.rate("rate"),
        shared=table.flag("shared"),
        latency_s=table.duration("latency", _STORAGE.latency_s),
        request_bytes_per_s=table.optional_rate("request"),
        requests_per_s=table.frequency("requests"),
        rack=table.optional_text("rack"),
    )


def _require_unique(names: list[str], where: str, key: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise RequestError(f"{where}: {key}: two are named {name!r}; give each its own name")
