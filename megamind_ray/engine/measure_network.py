"""What one thread moves over TCP on this machine, measured; and what its network interfaces are sold as."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Nic
from megamind_ray.units import MIB

__all__ = ["loopback_rate", "nominal_nics"]

_SENT_BYTES: Final = 128 * MIB
_BUFFER_BYTES: Final = 4 * MIB
_PATIENCE_S: Final = 10.0
_MEGABIT: Final = 1e6 / 8


def loopback_rate(num_bytes: int = _SENT_BYTES) -> float:
    """Bytes per second from one thread to another over TCP.

    Raises:
        OSError: The machine has no loopback interface, or it says nothing.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(_PATIENCE_S)
        sender = socket.create_connection(server.getsockname(), timeout=_PATIENCE_S)
        thread = threading.Thread(target=_send, args=(sender, num_bytes), name="measure-network", daemon=True)
        # Unwound from below: the receiver goes first, which ends a sender that is still at it.
        stack.enter_context(sender)
        thread.start()
        stack.callback(thread.join)
        receiver = stack.enter_context(server.accept()[0])
        receiver.settimeout(_PATIENCE_S)
        return _receive(receiver, num_bytes)


def _send(sender: socket.socket, num_bytes: int) -> None:
    data = memoryview(bytes(_BUFFER_BYTES))
    with contextlib.suppress(OSError):  # the receiver went away, and says why
        for begin in range(0, num_bytes, _BUFFER_BYTES):
            sender.sendall(data[: num_bytes - begin])
        sender.shutdown(socket.SHUT_WR)


def _receive(receiver: socket.socket, num_bytes: int) -> float:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    first = receiver.recv_into(buffer)  # from here on both threads are at it
    begin_s, received = time.perf_counter(), first
    while received < num_bytes:
        count = receiver.recv_into(buffer)
        if not count:
            raise ConnectionError(f"the connection ended after {received} of {num_bytes} bytes")
        received += count
    return max(1, received - first) / max(1e-9, time.perf_counter() - begin_s)


def nominal_nics(folder: Path = Path("/sys/class/net")) -> tuple[tuple[Nic, ...], tuple[str, ...]]:
    """The machine's network interfaces that are hardware and up, with the speed that they tell.

    Args:
        folder: Where the kernel lists them.

    Returns:
        The interfaces, and notes on those that do not tell their speed and are left out.
    """
    nics: list[Nic] = []
    silent: list[str] = []
    with contextlib.suppress(OSError):
        for interface in sorted(folder.iterdir()):
            if not (interface / "device").exists() or _line(interface / "operstate") == "down":
                continue
            speed = _line(interface / "speed")
            if speed.isdigit() and int(speed):
                nics.append(Nic(name=interface.name, bytes_per_s=int(speed) * _MEGABIT))
            else:
                silent.append(interface.name)
    notes = [f"network interface {name}: left out, it does not tell its speed; add it to nics" for name in silent]
    if not nics and not silent:
        notes.append("no network interface was found; add the machine's to nics")
    return tuple(nics), tuple(notes)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # interfaces that are no hardware, or down, refuse some of their files
        return ""
