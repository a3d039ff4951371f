"""Links have the rates that the topology says, can be cut, slowed and mended, and count what passes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.planning.topology_dump import dump_topology
from megamind_ray.testing.testbed import Bed, Host, Program, bed_node, in_two_racks, switched, with_nic

FAST, SLOW = 20e6, 4e6
MIB = 1 << 20
BOUND_S = 30.0
PORT = 7000

_RECEIVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    with connection:
        count = 0
        while piece := connection.recv(1 << 18):
            count += len(piece)
            print(count, flush=True)
"""
# Its time begins with the first byte and ends when the other side has all of them.
_SEND = """
import socket, sys, time
begin = time.perf_counter()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.perf_counter() - begin)
"""


def receiver(host: Host, port: int = PORT) -> Program:
    program = host.start(sys.executable, "-c", _RECEIVE, str(port))
    wait_for(lambda: "listens" in program.output)
    return program


def wait_for(reached: object) -> None:
    assert callable(reached)
    until_s = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < until_s, "not reached"
        time.sleep(0.02)


def received(program: Program) -> int:
    lines = program.output.splitlines()
    return int(lines[-1]) if len(lines) > 1 else 0


def seconds(source: Host, target: Host, num_bytes: int) -> float:
    """How long bytes take from host to host."""
    other = receiver(target)
    took = float(source.python(_SEND, target.name, str(PORT), str(num_bytes)))
    assert other.wait(BOUND_S).returncode == 0
    assert received(other) == num_bytes
    return took


def test_racks_share_their_uplinks() -> None:
    """Two senders of a rack of two, an uplink half as wide as their NICs: as long as if one had sent it all."""
    with Bed(in_two_racks(nic_bytes_per_s=FAST, oversubscribed=2.0)) as bed:
        size = 4 * MIB
        mark = bed.counters()
        pairs = [(bed.host("r0n0"), bed.host("r1n0")), (bed.host("r0n1"), bed.host("r1n1"))]
        others = [receiver(target) for _, target in pairs]
        senders = [
            source.start(sys.executable, "-c", _SEND, target.address, str(PORT), str(size)) for source, target in pairs
        ]
        took = [float(sender.wait(BOUND_S).stdout) for sender in senders]
        assert [received(other) for other in others if other.wait(BOUND_S)] == [size, size]
        crossed = bed.counters().since(mark).uplinks
        inside_s = seconds(bed.host("r0n0"), bed.host("r0n1"), size)
        still = bed.counters().since(mark).uplinks

    assert max(took) > (2 * size - MIB) / FAST
    assert inside_s < max(took)
    assert 2 * size < crossed["r0"].sent_bytes < 2.2 * size
    assert 2 * size < crossed["r1"].received_bytes < 2.2 * size
    assert still["r0"].sent_bytes - crossed["r0"].sent_bytes < 10_000, "what stays in a rack does not cross"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Three hosts without Ray; ``n2`` has a slow link."""
    with Bed(with_nic(switched(num_hosts=3, nic_bytes_per_s=FAST), "n2", SLOW)) as bed:
        yield bed


def test_a_link_gives_its_rate_and_no_more(bed: Bed) -> None:
    """Faster than its rate no machine can be, whatever else it does; slower it is by the same factor on both links."""
    size = 6 * MIB

    fast_s = seconds(bed.host("n0"), bed.host("n1"), size)
    slow_s = seconds(bed.host("n0"), bed.host("n2"), size)

    # What a queue lets through at once, and what sockets still hold when the sender's part is over.
    in_advance = MIB
    assert fast_s > (size - in_advance) / FAST
    assert slow_s > (size - in_advance) / SLOW
    assert 2.5 < slow_s / fast_s < 7  # 5 by the topology


def test_links_count_what_passes_either_way(bed: Bed) -> None:
    size = 2 * MIB
    mark = bed.counters()

    seconds(bed.host("n0"), bed.host("n1"), size)

    moved = bed.counters().since(mark).hosts
    assert size < moved["n0"].sent_bytes < 1.1 * size
    assert size < moved["n1"].received_bytes < 1.1 * size
    assert moved["n0"].received_bytes < 0.1 * size
    assert moved["n2"].received_bytes < 10_000


def test_a_cut_link_is_silent_and_what_was_under_way_goes_on_when_it_is_mended(bed: Bed) -> None:
    source, target = bed.host("n0"), bed.host("n2")
    size = 4 * MIB
    other = receiver(target)
    sender = source.start(sys.executable, "-c", _SEND, target.address, str(PORT), str(size))
    wait_for(lambda: received(other) > 0)

    target.link.cut()
    try:
        connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5)"
        tried = source.run(sys.executable, "-c", connect, target.address, str(PORT))
        assert tried.returncode != 0
        assert "TimeoutError" in tried.stderr, "lost in silence, not refused"
        before = target.traffic()
        source.run(sys.executable, "-c", connect, target.address, str(PORT))
        assert target.traffic().received_bytes == before.received_bytes
        assert received(other) < size
        assert sender.is_running
    finally:
        target.link.mend()

    assert sender.wait(BOUND_S).returncode == 0
    assert other.wait(BOUND_S).returncode == 0
    assert received(other) == size


def test_a_link_can_be_slowed(bed: Bed) -> None:
    source, target = bed.host("n0"), bed.host("n1")
    size = 2 * MIB
    target.link.set_rate(FAST / 10)
    try:
        slowed_s = seconds(source, target, size)
    finally:
        target.link.set_rate(FAST)

    assert slowed_s > (size - MIB) / (FAST / 10)
    assert slowed_s > 3 * seconds(source, target, size)


def test_a_bed_is_made_of_a_topology_file_and_says_where_its_hosts_are(tmp_path: Path) -> None:
    described = in_two_racks(hosts_per_rack=1, nic_bytes_per_s=FAST)
    file = tmp_path / "racks.toml"
    file.write_text(dump_topology(described), encoding="utf-8")

    with Bed(file) as bed:
        assert [host.name for host in bed.hosts] == ["r0n0", "r1n0"]
        addresses = [node.address for node in bed.topology.nodes]
        assert addresses == [host.address for host in bed.hosts]
        assert replace(bed.topology, nodes=described.nodes) == described
        name = bed.hosts[0].python("import socket; print(socket.gethostname(), socket.gethostbyname('r1n0'))")
        assert name.split() == ["r0n0", addresses[1]]


def test_two_beds_know_nothing_of_each_other(bed: Bed) -> None:
    """They use the same addresses."""
    with Bed(switched(num_hosts=1)) as other:
        listening = receiver(other.host("n0"))
        with pytest.raises(mm.MegamindError, match="refused"):
            bed.host("n1").python(_SEND, other.host("n0").address, str(PORT), "1")
        listening.kill()


def test_a_host_can_be_added_and_names_are_its_own(bed: Bed) -> None:
    added = bed.add_host(bed_node("late", nic_bytes_per_s=FAST))
    try:
        assert seconds(bed.host("n0"), added, MIB) > 0
        with pytest.raises(mm.RequestError, match="a host 'late' already"):
            bed.add_host(bed_node("late"))
        with pytest.raises(mm.RequestError, match=r"no host 'n9'; there are n0, n1, n2, late"):
            bed.host("n9")
    finally:
        added.power_off()
