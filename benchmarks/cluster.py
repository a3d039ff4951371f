"""Loads by ranks on several hosts: what moves over which link, how long it takes, what a lost host costs.

Hosts are those of the test bed (``megamind_ray.testing.testbed``): network namespaces of this machine with links of 500
Mbit/s, a Ray node each, five at most. Needs root, iproute2 and util-linux, and about 8 GiB of memory. Bytes are those
that interfaces count (1.001 of the payload) and those that the web server sent. Each load is compared tensor by tensor
with the files; a load that failed is a row that failed (``ended well``), and the document's config says why and which
rows could not be measured for it.

``one-host``  three receivers of everything that a fourth host alone has, against one receiver; again with a source that
              has a rank itself
``shared``    storage that all reach, on 1, 2 and 4 hosts
``racks``     two racks of two, uplinks of a quarter of a link, storage in the first rack
``killed``    one of three receiving hosts switched off after 30, 60, 90% of storage's bytes, a fourth is spare;
              detection: until the load machine is told of a loss; recovery: from there to the load's end, and as the
              simulator has it, with the same loss noticed as late
``straggler`` two hosts load everything, storage is ten times slower for one of them: left alone, and with what it has
              not begun read by the others
``wires``     two hosts, links without a limit: what Ray's object store and NIXL bring from one to the other, in turns
              (docs/design/0030). Without ``nixl`` its rows are missing. No RDMA hardware: NIXL goes over UCX's TCP
Every case that ends well is also predicted (``mm.plan`` and ``mm.simulate`` on the bed's topology).

    python -m benchmarks.cluster --json out.json           # 192 MiB, about 20 minutes on two cores
    python -m benchmarks.cluster --quick                   # 32 MiB, one-host and shared, rough
    python -m benchmarks.cluster --only racks --rounds 5

The status is 1 if a target was missed or a load failed, 2 without a test bed; with --quick it is 0.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks._cluster_killed import SHARES, killed
from benchmarks._cluster_rows import Found
from benchmarks._cluster_scenarios import NIC_BYTES_PER_S, STORAGE_BYTES_PER_S, one_host, racks, shared
from benchmarks._cluster_session import SETTINGS, Expected, say, write_model
from benchmarks._cluster_straggler import SLOW_BYTES_PER_S, straggler
from benchmarks._cluster_wires import wires
from benchmarks._result import parse_arguments, write_result
from megamind_ray.errors import ClusterError
from megamind_ray.testing.testbed import RaySettings, missing
from megamind_ray.units import MIB

_PARTS = ("one-host", "shared", "racks", "killed", "straggler", "wires")
_QUICK_PARTS = ("one-host", "shared")
_BYTES, _QUICK_BYTES = 192 * MIB, 32 * MIB
_ROUNDS, _QUICK_ROUNDS = 3, 1


def main() -> None:
    """Runs the benchmark."""
    arguments = parse_arguments(
        __doc__,
        only={"nargs": "+", "choices": _PARTS, "metavar": "PART", "help": f"of {', '.join(_PARTS)}"},
        rounds={"type": int, "help": f"that count ({_ROUNDS}; {_QUICK_ROUNDS} with --quick)"},
        deadline_s={"type": float, "default": 3600.0, "help": "of the whole run (3600)"},
    )
    quick = arguments.quick
    rounds = arguments.rounds or (_QUICK_ROUNDS if quick else _ROUNDS)
    parts = arguments.only or (_QUICK_PARTS if quick else _PARTS)
    reason = missing()
    found = Found()
    config = {"parts": list(parts), "rounds": rounds, "settings": SETTINGS, "load_average_before": os.getloadavg()}
    if reason is not None:
        say(f"nothing was measured: no test bed on this machine: {reason}")
        write_result("cluster", [], config={**config, "failures": {"all": reason}}, arguments=arguments)
        sys.exit(0 if quick else 2)
    faulthandler.dump_traceback_later(arguments.deadline_s, exit=True)
    with tempfile.TemporaryDirectory(prefix="mmcluster-") as folder:
        expected = Expected(write_model(Path(folder) / "model", _QUICK_BYTES if quick else _BYTES))
        scenarios: dict[str, Callable[[], None]] = {
            "one-host": lambda: one_host(found, expected, rounds=rounds, quick=quick),
            "shared": lambda: shared(found, expected, rounds=rounds, quick=quick),
            "racks": lambda: racks(found, expected, rounds=rounds),
            "killed": lambda: killed(found, expected),
            "straggler": lambda: straggler(found, expected, rounds=rounds),
            "wires": lambda: wires(found, expected, rounds=rounds),
        }
        for part in parts:
            try:
                scenarios[part]()
            except ClusterError as error:  # of the bed; the other scenarios have beds of their own
                found.ended(f"{part}: the test bed", [False], str(error))
        if set(parts) != {"wires"}:  # which has nothing that could be predicted
            found.close()
        config |= {
            "checkpoint_bytes": expected.checkpoint.nbytes,
            "nic_bytes_per_s": NIC_BYTES_PER_S,
            "storage_bytes_per_s": STORAGE_BYTES_PER_S,
            "racks": {"uplink_bytes_per_s": NIC_BYTES_PER_S / 4, "storage_in": "r0", "head_in": "none"},
            "killed_at": list(SHARES),
            "straggler_bytes_per_s": SLOW_BYTES_PER_S,
            "ray_notices_silent_hosts_after_s": _silence_s(RaySettings()),
        }
    said = {"failures": found.failures, "not_measured": found.not_measured, "details": found.details}
    write_result("cluster", found.rows, config={**config, **said}, arguments=arguments)
    faulthandler.cancel_dump_traceback_later()
    if not quick and any(row.passed is False for row in found.rows):
        sys.exit(1)


def _silence_s(settings: RaySettings) -> float:
    return (settings.health_period_ms + settings.health_timeout_ms) * settings.health_failures / 1000


if __name__ == "__main__":
    main()
