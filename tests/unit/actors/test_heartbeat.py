"""Heartbeats over the loopback."""

import threading
from pathlib import Path
from time import monotonic, sleep

import pytest

from megamind_ray.actors import heartbeat
from megamind_ray.actors.heartbeat import Heartbeat, Listener
from megamind_ray.core.ids import NodeId

_DEADLINE_S = 10.0


def test_a_node_that_says_nothing_more_is_silent_after_a_while() -> None:
    listener = Listener("127.0.0.1", silence_s=0.4)
    beats = [Heartbeat(listener.pulse, NodeId(name)) for name in ("lives", "dies")]
    for name in ("lives", "dies"):
        listener.expect(NodeId(name))
    try:
        sleep(0.2)
        beats[1].end()
        until_s = monotonic() + _DEADLINE_S
        while "dies" not in listener.silent() and monotonic() < until_s:
            sleep(0.02)
        assert "dies" in listener.silent()
    finally:
        beats[0].end()
        listener.close()


def test_a_load_that_ends_does_not_wait_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LOOK_S", 10 * _DEADLINE_S)
    listener = Listener("127.0.0.1", silence_s=8.0)

    closing = threading.Thread(target=listener.close, daemon=True)
    closing.start()
    closing.join(_DEADLINE_S)

    assert not closing.is_alive()


def test_it_listens_on_the_address_of_its_node_alone() -> None:
    listener = Listener("127.0.0.1", silence_s=1.0)
    try:
        port = f"{listener.pulse.port:04X}"
        lines = Path("/proc/net/udp").read_text().splitlines()[1:]
        bound = [line.split()[1].partition(":")[0] for line in lines if line.split()[1].endswith(f":{port}")]
    finally:
        listener.close()
    assert bound == ["0100007F"]
