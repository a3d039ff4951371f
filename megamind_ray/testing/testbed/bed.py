"""A bed: the hosts of a topology, their network, Ray on them, storage that they share, and counters of it all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from megamind_ray.core.topology import Node, Storage, Topology
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.planning.topology_file import load_topology
from megamind_ray.testing.rated_server import RatedServer, Rates
from megamind_ray.testing.testbed.host import Host
from megamind_ray.testing.testbed.leavings import bed_folder, remove_leavings
from megamind_ray.testing.testbed.namespaces import Namespaces
from megamind_ray.testing.testbed.needs import missing
from megamind_ray.testing.testbed.network import Network, Traffic
from megamind_ray.testing.testbed.ray_nodes import GCS_PORT, RaySettings, Watcher, start_command

__all__ = ["Bed", "Counters"]

_SUBNET: Final = "10.77.0"  # seen by nobody else: the switches are in a namespace of their own
_FIRST_HOST: Final = 10
_FIRST_SERVER: Final = 200
_START_S: Final = 60.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes on the links so far.

    Attributes:
        hosts: By the name of the host; those that are switched off are left out.
        uplinks: By the name of the rack.
    """

    hosts: Mapping[str, Traffic]
    uplinks: Mapping[str, Traffic]

    def since(self, mark: Counters) -> Counters:
        """What came since an earlier reading; hosts that were not there then are left out."""
        return Counters(
            {name: now.since(mark.hosts[name]) for name, now in self.hosts.items() if name in mark.hosts},
            {name: now.since(mark.uplinks[name]) for name, now in self.uplinks.items()},
        )


class Bed:
    """Hosts as a topology describes them, without Ray until ``start_ray``. Not thread-safe.

    A host's link has the rate of its NICs together; one without a NIC has no limit. A rack that nodes name and that the
    topology does not list has no switch of its own. The first host is the head.

    Attributes:
        topology: As given, with the addresses that the hosts have here.
        folder: Files of the bed: outputs of programs, the token. Every host sees it at this path.
        ray_address: ``HOST:PORT`` of the head's GCS; ``RAY_ADDRESS`` of all programs.

    Args:
        topology: Or the path of a topology file.
        settings: Of Ray.
    """

    def __init__(self, topology: Topology | str | Path, *, settings: RaySettings | None = None) -> None:
        """Makes hosts and network, after it removed what beds of dead processes left.

        Raises:
            RequestError: The topology file is wrong, or this machine cannot have a bed.
            ClusterError: The kernel refused something.
        """
        reason = missing()
        if reason is not None:
            raise RequestError(f"no test bed on this machine: {reason}")
        described = topology if isinstance(topology, Topology) else load_topology(topology)
        self.settings = settings or RaySettings()
        self._hosts: dict[str, Host] = {}
        self._num_servers = 0
        self._watcher: Watcher | None = None
        remove_leavings()
        self.folder = bed_folder()
        self._open = ExitStack()
        self._open.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.topology = replace(described, nodes=())
        try:
            for name in ("ray", "local"):
                (self.folder / name).mkdir()
            (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
            self._token = self.folder / "token"
            self._token.write_text(os.urandom(32).hex())
            self._network = Network(described.racks, self.folder)
            self._open.callback(self._network.close)
            for node in described.nodes:
                self._make_host(node)
        except BaseException:
            self.close()
            raise
        self.ray_address = f"{self.head.address}:{GCS_PORT}"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts, in the order of the topology; those that were switched off too."""
        return tuple(self._hosts.values())

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def host(self, name: str) -> Host:
        """The host of this name.

        Raises:
            RequestError: There is none.
        """
        if name not in self._hosts:
            raise RequestError(f"no host {name!r}; there are {', '.join(self._hosts)}")
        return self._hosts[name]

    def start_ray(self) -> None:
        """Starts a Ray node on every host and waits until the head knows them all.

        Raises:
            ClusterError: One ended, or they are not all there within a minute.
        """
        assert self._watcher is None, "Ray runs"
        self._watcher = Watcher(
            self.head.namespaces, self.ray_address, self._environment(), self.folder / "watcher.err"
        )
        self._open.callback(self._watcher.close)
        # The others wait for the head by themselves.
        for host in self.hosts:
            self.start_ray_on(host)
        self._watcher.wait_until_ready()
        self.wait_until_alive([host.name for host in self.hosts], timeout_s=_START_S)

    def start_ray_on(self, host: Host) -> None:
        """Starts a Ray node on one host, which may have left before; does not wait for it."""
        host.start_ray(*start_command(host.node, host.address, self.head.address, self.folder / "ray", self.settings))

    def add_host(self, node: Node) -> Host:
        """Adds a host; a Ray node starts on it if Ray runs, and ``wait_until_alive`` waits for it.

        Raises:
            RequestError: There is one of this name, or its rack is not there.
        """
        host = self._make_host(node)
        if self._watcher is not None:
            self.start_ray_on(host)
        return host

    def alive(self) -> set[str]:
        """Names of the hosts whose Ray node the head takes for alive.

        Raises:
            ClusterError: The head does not answer.
        """
        assert self._watcher is not None, "start_ray first"
        addresses = self._watcher.alive()
        return {host.name for host in self.hosts if host.address in addresses}

    def wait_until_alive(self, names: Collection[str], *, timeout_s: float) -> None:
        """Waits until the head takes exactly these hosts for alive.

        Raises:
            ClusterError: It does not in that time, or the Ray node of one of them ended.
        """
        until_s = time.monotonic() + timeout_s
        while (alive := self.alive()) != set(names):
            for name in names:
                self.host(name).require_ray()
            if time.monotonic() > until_s:
                raise ClusterError(f"after {timeout_s:g} s {sorted(alive)} are alive, not {sorted(names)}")
            time.sleep(_POLL_S)

    def serve(self, folder: Path, rates: Rates | None = None, *, rack: str | None = None) -> RatedServer:
        """A web server on a host of its own, whose link has no limit; its URI is good on every host.

        Args:
            folder: What it serves; a checkpoint's URI is the server's, or that and a path.
            rates: None: those of the topology's storage; without one, no limits.
            rack: Whose switch it hangs on; None: the one in the middle, so that racks reach it over their uplinks.
        """
        number = self._num_servers
        self._num_servers += 1
        namespaces = Namespaces(f"storage{number}", self.folder)
        self._open.callback(namespaces.close)
        address = f"{_SUBNET}.{_FIRST_SERVER + number}"
        self._network.plug(namespaces, address, bytes_per_s=None, rack=rack)
        rates = _rates(self.topology.storage) if rates is None else rates
        server = RatedServer(folder, rates, address=address, before=namespaces.enter())
        self._open.callback(server.close)
        return server

    def counters(self) -> Counters:
        """Bytes on the links so far."""
        hosts = {host.name: host.traffic() for host in self.hosts if host.is_alive}
        return Counters(hosts, self._network.uplinks())

    def close(self) -> None:
        """Ends all processes and removes everything. Does nothing the second time."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_host(self, node: Node) -> Host:
        name = str(node.id)
        if name in self._hosts:
            raise RequestError(f"there is a host {name!r} already; give each its own name")
        address = f"{_SUBNET}.{_FIRST_HOST + len(self._hosts)}"
        with (self.folder / "hosts").open("a") as file:
            file.write(f"{address} {name}\n")
        rate = node.nic_bytes_per_s if node.nics else None
        host = Host(
            node,
            address,
            self.folder,
            lambda namespaces: self._network.plug(namespaces, address, bytes_per_s=rate, rack=node.rack),
        )
        self._open.callback(host.close)
        self._hosts[name] = host
        self.topology = replace(self.topology, nodes=(*self.topology.nodes, replace(node, address=address)))
        host.set_environment(self._environment())
        return host

    def _environment(self) -> dict[str, str]:
        return self.settings.variables(self.head.address, self._token)


def _rates(storage: Storage | None) -> Rates:
    if storage is None:
        return Rates()
    return Rates(
        bytes_per_s=storage.bytes_per_s,
        latency_s=storage.latency_s,
        request_bytes_per_s=storage.request_bytes_per_s,
        requests_per_s=storage.requests_per_s,
    )
