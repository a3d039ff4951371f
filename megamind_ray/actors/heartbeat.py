"""Heartbeats of nodes in a load: a datagram a second from each to the planner, which waits for nobody's answer.

Not over Ray's connections: after a cut of some seconds, those may try again only as many seconds later.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final

from megamind_ray.actors.messages import Pulse
from megamind_ray.core.ids import NodeId
from megamind_ray.core.liveness import BEATS_PER_SILENCE, Liveness

__all__ = ["Heartbeat", "Listener"]

_TOKEN_BYTES: Final = 16
_LONGEST: Final = 256
_LOOK_S: Final = 0.25


class Heartbeat:
    """Says that a node lives, until ``end``.

    Args:
        pulse: Whom it tells, and how often.
        node: The node.
    """

    def __init__(self, pulse: Pulse, node: NodeId) -> None:
        self._pulse, self._message = pulse, pulse.token + node.encode()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name=f"heartbeat-{node[:8]}", daemon=True).start()

    def end(self) -> None:
        """Nothing is said any more."""
        self._ended.set()

    def _beat(self) -> None:
        target = (self._pulse.address, self._pulse.port)
        with socket.socket(_family(self._pulse.address), socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            while not self._ended.is_set():
                with suppress(OSError):  # no way there at the moment; the next one may find one
                    out.sendto(self._message, target)
                self._ended.wait(self._pulse.every_s)


class Listener:
    """Hears heartbeats on a thread of its own. All methods may be called from any thread.

    Args:
        address: Of this node, as the others reach it.
        silence_s: As ``Liveness`` has it.
        clock: Monotonic.

    Attributes:
        pulse: For the nodes.
    """

    def __init__(self, address: str, *, silence_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._socket = socket.socket(_family(address), socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(_LOOK_S)
        self.pulse = Pulse(
            address=address,
            port=self._socket.getsockname()[1],
            token=os.urandom(_TOKEN_BYTES),
            every_s=silence_s / BEATS_PER_SILENCE,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._liveness = Liveness(silence_s, now_s=clock())
        self._silent: dict[NodeId, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeats", daemon=True)
        self._thread.start()

    def expect(self, node: NodeId) -> None:
        """Signs of life of this node are to come from now on."""
        with self._lock:
            self._liveness.expect(node, self._clock())

    def forget(self, node: NodeId) -> None:
        """It was given up, or has no part any more."""
        with self._lock:
            self._liveness.forget(node)
            self._silent.pop(node, None)

    def answered(self, node: NodeId) -> None:
        """It just answered something else."""
        with self._lock:
            self._liveness.answered(node, self._clock())

    def silent(self) -> dict[NodeId, float]:
        """Nodes without a sign of life for too long, with the seconds since the last one."""
        with self._lock:
            return dict(self._silent)

    def close(self) -> None:
        """Ends it, at once: a load waits for it."""
        self._ended.set()
        with suppress(OSError):  # without it, the thread looks up by itself, a moment later
            self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(2 * _LOOK_S)
        self._socket.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            message = b""
            with suppress(OSError):  # nothing came for a moment, or it was closed
                message = self._socket.recv(_LONGEST)
            with self._lock:
                if hmac.compare_digest(message[:_TOKEN_BYTES], self.pulse.token):
                    self._liveness.beat(NodeId(message[_TOKEN_BYTES:].decode(errors="replace")), self._clock())
                self._silent = self._liveness.look(self._clock())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
