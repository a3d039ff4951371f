"""Loopback, and what network interfaces say of themselves."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from megamind_ray.core.topology import Nic
from megamind_ray.engine import measure_network
from megamind_ray.engine.measure_network import loopback_rate, nominal_nics


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "measure-network"]


def test_bytes_go_from_one_thread_to_another() -> None:
    assert loopback_rate(9 << 20) > 0
    assert _threads() == []


def test_a_connection_that_ends_early_is_an_error_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(sender: socket.socket, _num_bytes: int) -> None:
        sender.sendall(b"hello")
        sender.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(measure_network, "_send", breaks_off)

    with pytest.raises(OSError, match="the connection ended after 5 of 9437184 bytes"):
        loopback_rate(9 << 20)
    assert _threads() == []


def test_a_receiver_that_fails_ends_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_receiver: socket.socket, _num_bytes: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_network, "_receive", fails)

    with pytest.raises(KeyboardInterrupt):
        loopback_rate(1 << 30)
    assert _threads() == []


def _interface(folder: Path, name: str, *, speed: str | None, state: str = "up", hardware: bool = True) -> None:
    (folder / name).mkdir()
    (folder / name / "operstate").write_text(f"{state}\n")
    if speed is not None:
        (folder / name / "speed").write_text(f"{speed}\n")
    if hardware:
        (folder / name / "device").mkdir()


def test_interfaces_have_the_speed_that_they_tell(tmp_path: Path) -> None:
    _interface(tmp_path, "ib0", speed="200000")
    _interface(tmp_path, "eth0", speed="10000", state="unknown")
    _interface(tmp_path, "eth1", speed="10000", state="down")
    _interface(tmp_path, "docker0", speed="10000", hardware=False)
    _interface(tmp_path, "lo", speed=None, hardware=False)

    nics, notes = nominal_nics(tmp_path)

    assert nics == (Nic(name="eth0", bytes_per_s=1.25e9), Nic(name="ib0", bytes_per_s=25e9))
    assert notes == ()


@pytest.mark.parametrize("speed", ["-1", "0", "", None])
def test_an_interface_that_does_not_tell_its_speed_is_left_out_with_a_note(tmp_path: Path, speed: str | None) -> None:
    _interface(tmp_path, "eth0", speed=speed)

    nics, (note,) = nominal_nics(tmp_path)

    assert nics == ()
    assert note == "network interface eth0: left out, it does not tell its speed; add it to nics"


def test_a_machine_without_any_is_told(tmp_path: Path) -> None:
    assert nominal_nics(tmp_path / "none") == ((), ("no network interface was found; add the machine's to nics",))
