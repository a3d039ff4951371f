"""Bridges and links: a switch per rack, uplinks to one in the middle, and a link with a real rate to every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Rack
from megamind_ray.errors import RequestError
from megamind_ray.testing.testbed.namespaces import Namespaces

__all__ = ["HOST_INTERFACE", "Link", "Network", "Traffic"]

HOST_INTERFACE: Final = "eth0"
_NETMASK: Final = 16
# As in data centres; with 1,500 bytes a twentieth of a link would be headers.
_MTU: Final = 9000
# A packet on a virtual link has up to 64 KiB until it meets a queue that gives less at once.
_LEAST_BURST_BYTES: Final = 96 << 10
_BURST_S: Final = 0.002
_LEAST_QUEUE_BYTES: Final = 256 << 10
_QUEUE_S: Final = 0.05
_MIDDLE: Final = "middle"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on a link, with their Ethernet headers.

    Attributes:
        sent_bytes: By the host, or out of the rack.
        received_bytes: By the host, or into the rack.
    """

    sent_bytes: int
    received_bytes: int

    def since(self, earlier: Traffic) -> Traffic:
        """What came since an earlier reading."""
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


class Network:
    """The switches, in a network namespace of their own.

    Args:
        racks: Each gets a switch and an uplink of its rate to the one in the middle.
        folder: Of the bed.
    """

    def __init__(self, racks: Sequence[Rack], folder: Path) -> None:
        self._namespaces = Namespaces("switches", folder)
        self._num_ports = 0
        self._racks: dict[str, int] = {}
        try:
            self._namespaces.network(_bridge(_MIDDLE))
            for rack in racks:
                self._add_rack(rack)
        except BaseException:
            self.close()
            raise

    def plug(self, host: Namespaces, address: str, *, bytes_per_s: float | None, rack: str | None = None) -> Link:
        """Connects a host.

        Args:
            host: Its namespaces.
            address: Its IP address.
            bytes_per_s: Each way; None: no limit.
            rack: Whose switch it hangs on; None, or one without an uplink's rate: the one in the middle.
        """
        port = f"port{self._num_ports}"
        self._num_ports += 1
        bridge = f"rack{self._racks[rack]}" if rack in self._racks else _MIDDLE
        self._namespaces.network(
            [
                f"link add name {port} mtu {_MTU} type veth peer name {HOST_INTERFACE} mtu {_MTU} netns {host.pid}",
                f"link set dev {port} master {bridge}",
                f"link set dev {port} up",
            ]
        )
        host.network(
            [f"addr add {address}/{_NETMASK} dev {HOST_INTERFACE}", f"link set dev {HOST_INTERFACE} up"],
        )
        link = Link(self._namespaces, host, port, bridge)
        link.set_rate(bytes_per_s)
        return link

    def uplinks(self) -> dict[str, Traffic]:
        """Bytes on each rack's uplink so far."""
        interfaces = self._namespaces.interfaces()
        found = {}
        for rack, index in self._racks.items():
            received, sent = interfaces[f"up{index}"]
            found[rack] = Traffic(sent_bytes=sent, received_bytes=received)
        return found

    def close(self) -> None:
        """Removes switches and links."""
        self._namespaces.close()

    def _add_rack(self, rack: Rack) -> None:
        index = self._racks.setdefault(rack.name, len(self._racks))
        bridge, inner, outer = f"rack{index}", f"up{index}", f"down{index}"
        self._namespaces.network(
            [
                *_bridge(bridge),
                f"link add name {inner} mtu {_MTU} type veth peer name {outer} mtu {_MTU}",
                f"link set dev {inner} master {bridge}",
                f"link set dev {outer} master {_MIDDLE}",
                f"link set dev {inner} up",
                f"link set dev {outer} up",
            ]
        )
        shaped = [_shaped(end, rack.uplink_bytes_per_s) for end in (inner, outer)]
        self._namespaces.network(shaped, program="tc")


class Link:
    """A host's cable. Its rate is that of what leaves either end."""

    def __init__(self, switches: Namespaces, host: Namespaces, port: str, bridge: str) -> None:
        self._switches, self._host, self._port, self._bridge = switches, host, port, bridge
        self._is_shaped = False

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Gives it another rate; None: no limit.

        Raises:
            RequestError: Not a positive rate.
        """
        if bytes_per_s is not None and bytes_per_s < 1e3:
            raise RequestError(f"a link of {bytes_per_s:g} bytes/s: take 1 kB/s or more, or cut it")
        for end, device in ((self._switches, self._port), (self._host, HOST_INTERFACE)):
            if bytes_per_s is not None:
                end.network([_shaped(device, bytes_per_s)], program="tc")
            elif self._is_shaped:
                end.network([f"qdisc del dev {device} root"], program="tc")
        self._is_shaped = bytes_per_s is not None

    def cut(self) -> None:
        """Packets are lost in silence, both ways; the host's interface stays up, as behind a broken switch."""
        # A port of no bridge takes packets and drops them. The state of a port cannot be set: without the spanning tree
        # protocol the kernel goes back to forwarding.
        self._switches.network([f"link set dev {self._port} nomaster"])

    def mend(self) -> None:
        """The opposite."""
        self._switches.network([f"link set dev {self._port} master {self._bridge}"])

    def traffic(self) -> Traffic:
        """Bytes so far."""
        received, sent = self._host.interfaces()[HOST_INTERFACE]
        return Traffic(sent_bytes=sent, received_bytes=received)


def _bridge(name: str) -> list[str]:
    # Without snooping and the spanning tree protocol nothing is sent that no host sent.
    options = "stp_state 0 forward_delay 0 mcast_snooping 0"
    return [f"link add name {name} mtu {_MTU} type bridge {options}", f"link set dev {name} up"]


def _shaped(device: str, bytes_per_s: float) -> str:
    burst = max(_LEAST_BURST_BYTES, int(bytes_per_s * _BURST_S))
    queue = max(_LEAST_QUEUE_BYTES, int(bytes_per_s * _QUEUE_S))
    return f"qdisc replace dev {device} root tbf rate {int(bytes_per_s * 8)}bit burst {burst} limit {queue}"
