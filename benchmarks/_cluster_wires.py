"""What each wire brings from one host to another over links without a limit: the ceiling of the data plane."""

from __future__ import annotations

from typing import Final

from benchmarks._cluster_rows import Found
from benchmarks._cluster_session import Expected, LoadFailed, Session, say
from megamind_ray.core.wires import WIRE_TITLES, WireName
from megamind_ray.testing.testbed import switched
from megamind_ray.units import MIB

__all__ = ["wires"]

# As large as the pools of two hosts on a small machine allow: a measurement of a real cluster takes its own.
_POOL_BYTES: Final = 512 * MIB
_SETTINGS: Final = {"io": {"extent_bytes": 16 * MIB}, "wire": {"measure_s": 6.0}}


def wires(found: Found, expected: Expected, *, rounds: int) -> None:
    """Ceilings in bytes per second and, within each round, how many times Ray's object store NIXL brings."""
    rates: dict[WireName, list[float]] = {"ray": [], "nixl": []}
    topology = switched(num_hosts=2, pool_bytes=_POOL_BYTES)
    with Session(topology, expected) as session:
        for host in session.bed.hosts:
            host.link.set_rate(None)
        for number in range(rounds + 1):
            try:
                answer = session.wires(_SETTINGS)
            except LoadFailed as error:
                found.ended("wires", [False], str(error))
                return
            found.details["wires"] = {"missing": answer["missing"]}
            say(f"wires: {answer['bytes_per_s']} {answer['missing']}")
            for wire, samples in rates.items():
                if number and wire in answer["bytes_per_s"]:
                    samples.append(answer["bytes_per_s"][wire])
    for wire, samples in rates.items():
        name = f"wires: {WIRE_TITLES[wire]}"
        found.row(name, samples, "bytes/s")
        if not samples:
            found.not_measured[name] = str(found.details["wires"]["missing"])
    ratios = [nixl / ray for nixl, ray in zip(rates["nixl"], rates["ray"], strict=False)]
    found.row("wires: NIXL / Ray's object store", ratios)
    if not ratios:
        found.not_measured["wires: NIXL / Ray's object store"] = str(found.details["wires"]["missing"])
