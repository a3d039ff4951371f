"""Several hosts on one machine: a network namespace each, links with real rates, a real Ray node each, real faults.

    >>> topology = switched(num_hosts=2, nic_bytes_per_s=50e6)
    >>> with Bed(topology) as bed:
    ...     server = bed.serve(folder)
    ...     bed.start_ray()
    ...     before = bed.counters()
    ...     print(bed.host("n0").python("import megamind_ray as mm; ...", server.uri))
    ...     print(bed.counters().since(before).hosts["n1"].received_bytes)
    ...     bed.host("n1").power_off()
    ...     bed.wait_until_alive({"n0"}, timeout_s=30)

Needs root on Linux, and iproute2 (``missing()`` says what is missing). docs/design/0022 has the decisions.
"""

from __future__ import annotations

from megamind_ray.testing.testbed.bed import Bed, Counters
from megamind_ray.testing.testbed.host import Host
from megamind_ray.testing.testbed.leavings import remove_leavings
from megamind_ray.testing.testbed.needs import missing
from megamind_ray.testing.testbed.network import Traffic
from megamind_ray.testing.testbed.processes import HostProcess
from megamind_ray.testing.testbed.programs import Program
from megamind_ray.testing.testbed.ray_nodes import RaySettings
from megamind_ray.testing.testbed.topologies import bed_node, in_two_racks, switched, with_nic

__all__ = [
    "Bed",
    "Counters",
    "Host",
    "HostProcess",
    "Program",
    "RaySettings",
    "Traffic",
    "bed_node",
    "in_two_racks",
    "missing",
    "remove_leavings",
    "switched",
    "with_nic",
]
