"""A ``Topology`` as the text of a topology file, which ``parse_topology`` gives back equal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Final

from megamind_ray.core.topology import SCHEMA, Host, Links, Node, Storage, Topology
from megamind_ray.units import GIB, KIB, MIB, parse_duration, parse_rate

__all__ = ["dump_topology"]

# As people write them: a value is shown in such a unit only where it comes back from it as it was.
_SIZES: Final = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_RATES: Final = ((1e9, "GB/s"), (1e6, "MB/s"))
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def dump_topology(topology: Topology, *, comments: Iterable[str] = ()) -> str:
    """The TOML text of a topology; ``parse_topology`` gives it back equal.

    Args:
        topology: What to write.
        comments: Lines at the top, such as how figures were measured.
    """
    lines = [_pair("schema", SCHEMA), *(f"# {_one_line(comment)}".rstrip() for comment in comments)]
    lines += _pairs(name=topology.name, source=topology.source or None)
    if topology.storage is not None:
        lines += ["", "[storage]", *_storage_lines(topology.storage)]
    for rack in topology.racks:
        lines += ["", "[[racks]]", *_pairs(name=rack.name, uplink=_rate(rack.uplink_bytes_per_s))]
    for node in topology.nodes:
        lines += ["", "[[nodes]]", *_node_lines(node)]
    lines += ["", "[links]", *_links_lines(topology.links)]
    return "\n".join(lines) + "\n"


def _links_lines(links: Links) -> list[str]:
    return _pairs(
        nvlink=_rate(links.nvlink_bytes_per_s),
        wire=_rate(links.wire_bytes_per_s),
        ray=_rate(links.ray_bytes_per_s),
        nixl=_rate(links.nixl_bytes_per_s),
    )


def _storage_lines(storage: Storage) -> list[str]:
    return _pairs(
        rate=_rate(storage.bytes_per_s),
        shared=storage.shared,
        latency=_duration(storage.latency_s),
        request=_rate(storage.request_bytes_per_s),
        requests=storage.requests_per_s,
        rack=storage.rack,
    )


def _node_lines(node: Node) -> Iterator[str]:
    yield from _pairs(name=node.id, address=node.address or None, rack=node.rack)
    yield from _pairs(memory=_size(node.memory_bytes), pool=_size(node.pool_bytes))
    yield from _pairs(pool_taken=_size(node.pool_taken_bytes) if node.pool_taken_bytes else None)
    if node.host != Host():
        yield from ("[nodes.host]", *_host_lines(node.host))
    # Equal GPUs with consecutive indices become one entry with a count.
    for alike, members in groupby(
        enumerate(node.gpus), key=lambda item: replace(item[1], index=item[1].index - item[0])
    ):
        run = [gpu for _, gpu in members]
        yield "[[nodes.gpus]]"
        yield from _pairs(
            index=run[0].index,
            count=len(run),
            memory=_size(alike.memory_bytes),
            free=_size(alike.free_bytes),
            kind=alike.kind,
            numa=alike.numa,
            nvlink_group=alike.nvlink_group,
            pcie=_rate(alike.pcie_bytes_per_s),
        )
    for switch in node.switches:
        yield from ("[[nodes.switches]]", *_pairs(gpus=list(switch.gpus), rate=_rate(switch.bytes_per_s)))
    for key, devices in (("disks", node.disks), ("nics", node.nics)):
        for device in devices:
            yield f"[[nodes.{key}]]"
            yield from _pairs(name=device.name, rate=_rate(device.bytes_per_s), latency=_duration(device.latency_s))


def _host_lines(host: Host) -> list[str]:
    return _pairs(
        cores=host.cores,
        memory_rate=_rate(host.memory_bytes_per_s),
        copy=_rate(host.copy_bytes_per_s),
        touch=_rate(host.touch_bytes_per_s),
        checksum=_rate(host.checksum_bytes_per_s),
        network=_rate(host.network_bytes_per_s),
        run=_duration(host.run_s),
        put=_duration(host.put_s),
        call=_duration(host.call_s),
        take=_duration(host.take_s),
    )


def _pairs(**values: object) -> list[str]:
    return [_pair(key, value) for key, value in values.items() if value is not None]


def _pair(key: str, value: object) -> str:
    return f"{key} = {_value(value)}"


def _size(num_bytes: int) -> int | str:
    return next(
        (f"{num_bytes // unit}{name}" for unit, name in _SIZES if num_bytes and not num_bytes % unit), num_bytes
    )


def _rate(bytes_per_s: float | None) -> float | str | None:
    for unit, name in _RATES:
        if bytes_per_s is not None and unit <= bytes_per_s < 1e6 * unit:
            text = f"{bytes_per_s / unit:.12g}{name}"
            if parse_rate(text) == bytes_per_s:
                return text
    return bytes_per_s


def _duration(seconds: float) -> float | str:
    for unit, name in _DURATIONS:
        if unit <= seconds < 1e3 * unit:
            text = f"{seconds / unit:.12g}{name}"
            if parse_duration(text) == seconds:
                return text
    return seconds


def _value(value: object) -> str:
    # A TOML basic string has the escapes of JSON, but for DEL, which TOML wants escaped and JSON does not.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _one_line(text: str) -> str:
    """A comment ends with its line, and has no control characters but tabs."""
    return "".join(char if char.isprintable() else " " for char in text)
