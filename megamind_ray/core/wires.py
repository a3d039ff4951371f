"""Which wire carries blocks from node to node: what was asked for, what there is, what was measured (0030)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from megamind_ray.core.topology import Links, Topology
from megamind_ray.errors import RequestError
from megamind_ray.units import format_rate

__all__ = ["RAY", "WIRE_TITLES", "Ceilings", "WireChoice", "WireName", "choose_wire", "known_ceilings", "with_wire"]

WireName = Literal["ray", "nixl"]
WIRE_TITLES: Final[Mapping[WireName, str]] = {"ray": "Ray's object store", "nixl": "NIXL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What each wire brings from one node to another at most, with blocks of the size that loads use.

    Attributes:
        ray_bytes_per_s, nixl_bytes_per_s: Of the slowest pair of nodes that was measured.
        origin: Where the figures are from, in words.
    """

    ray_bytes_per_s: float
    nixl_bytes_per_s: float
    origin: str

    def of(self, wire: WireName) -> float:
        """Bytes per second of one of them."""
        return self.nixl_bytes_per_s if wire == "nixl" else self.ray_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WireChoice:
    """The wire of a load.

    Attributes:
        wire: Which.
        reason: Why, in words.
        ceiling_bytes_per_s: What it brings; None: not known.
    """

    wire: WireName
    reason: str
    ceiling_bytes_per_s: float | None = None


# What a load has that chose nothing: one node, or nobody who could choose.
RAY: Final = WireChoice(wire="ray", reason="no other was looked for")


def choose_wire(
    use: Literal["auto", "ray", "nixl"], *, lacking: str, ceilings: Ceilings | None, faster: float
) -> WireChoice:
    """The wire of a load.

    A wire has to be clearly faster to be chosen: what is measured in a second swings, and Ray's is the one that all
    else here was tested with.

    Args:
        use: What was asked for (``wire.use``).
        lacking: Why NIXL cannot be used between these nodes; empty where it can.
        ceilings: What was measured; None: nothing.
        faster: How many times faster NIXL must have been.

    Raises:
        RequestError: NIXL was asked for, and cannot be used.
    """
    known = None if ceilings is None else ceilings.of
    if use == "ray":
        return WireChoice(wire="ray", reason="wire.use asks for it", ceiling_bytes_per_s=known and known("ray"))
    if use == "nixl":
        if lacking:
            raise RequestError(
                f"wire.use = 'nixl': {lacking}; `pip install megamind-ray[rdma]` on every node, or leave it at 'auto'"
            )
        return WireChoice(wire="nixl", reason="wire.use asks for it", ceiling_bytes_per_s=known and known("nixl"))
    if lacking:
        return WireChoice(wire="ray", reason=lacking, ceiling_bytes_per_s=known and known("ray"))
    if ceilings is None:
        return WireChoice(wire="ray", reason="nothing says that NIXL would be faster")
    ray, nixl = ceilings.ray_bytes_per_s, ceilings.nixl_bytes_per_s
    wire: WireName = "nixl" if nixl >= faster * ray else "ray"
    return WireChoice(
        wire=wire,
        reason=f"NIXL brought {format_rate(nixl)}, Ray's object store {format_rate(ray)}: {nixl / ray:.2f} times as "
        f"much, where wire.faster asks for {faster:g} ({ceilings.origin})",
        ceiling_bytes_per_s=ceilings.of(wire),
    )


def known_ceilings(links: Links, origin: str) -> Ceilings | None:
    """What a topology says of both wires; None where it lacks one."""
    if links.ray_bytes_per_s is None or links.nixl_bytes_per_s is None:
        return None
    return Ceilings(ray_bytes_per_s=links.ray_bytes_per_s, nixl_bytes_per_s=links.nixl_bytes_per_s, origin=origin)


def with_wire(topology: Topology, choice: WireChoice) -> Topology:
    """A topology whose data plane has the ceiling of the wire that was chosen, where that is known."""
    if choice.ceiling_bytes_per_s is None:
        return topology
    return replace(topology, links=replace(topology.links, wire_bytes_per_s=choice.ceiling_bytes_per_s))
