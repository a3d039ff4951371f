"""The cluster benchmark's scenario in which a receiving host is switched off in the middle of a load."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import megamind_ray as mm
from benchmarks._cluster_rows import Found, load_in_turns
from benchmarks._cluster_scenarios import NIC_BYTES_PER_S, STORAGE_BYTES_PER_S, with_head
from benchmarks._cluster_session import Expected, Loaded, LoadFailed, LoadingNow, Order, Session, say
from megamind_ray.testing.rated_server import RatedServer
from megamind_ray.testing.testbed import switched

__all__ = ["SHARES", "killed", "lost_at"]

SHARES: Final = (0.3, 0.6, 0.9)
_DETECTION_TARGET_S, _RECOVERY_TARGET_S = 10.0, 5.0
_HOLDING_S: Final = 60.0
_RECEIVES: Final = 0.02  # of the checkpoint: whoever received less has no part in the load
_STILL_S, _STILL_BYTES, _SETTLE_S = 0.3, 1 << 16, 20.0


@dataclass(slots=True)
class _Blow:
    """What was done to a load, and what became of it.

    Attributes:
        victim: The host.
        off_s, began_s, ended_s: When it was switched off, and the load's ends; on the monotonic clock.
        events: Of the load's log.
        loaded: Where it ended well.
        why: Where it did not.
    """

    victim: str
    off_s: float
    began_s: float = 0.0
    ended_s: float = 0.0
    events: list[dict[str, Any]] | None = None
    loaded: Loaded | None = None
    why: str | None = None

    @property
    def detected_s(self) -> float | None:
        """Seconds from the blow until the load knew that something was lost; None if it never did."""
        at_s = lost_at(self.events or [], self.off_s - self.began_s)
        return None if at_s is None else at_s - (self.off_s - self.began_s)


def killed(found: Found, expected: Expected) -> None:
    """Three hosts load everything, a fourth is spare; one of the three goes after a part of storage's bytes."""
    topology = with_head(
        switched(num_hosts=4, nic_bytes_per_s=NIC_BYTES_PER_S, storage_bytes_per_s=STORAGE_BYTES_PER_S)
    )
    for share in SHARES:
        case = f"killed at {share:.0%}"
        with Session(topology, expected) as session:
            server = session.bed.serve(expected.checkpoint.folder)
            order = Order(uri=server.uri, parallel=mm.Parallel(dp=3))
            before = f"{case}: undisturbed"
            loads = load_in_turns(found, session, {before: order}, topology, server=server, rounds=1)[before]
            try:
                blow = _strike(session, server, order, expected, share)
            except LoadFailed as error:
                blow = _Blow(victim="none", off_s=0.0, why=f"nobody could be switched off: {error}")
            _rows(found, case, blow, expected, loads)
            _predict(found, case, blow, session, order, expected, share)


def _predict(
    found: Found, case: str, blow: _Blow, session: Session, order: Order, expected: Expected, share: float
) -> None:
    """The same loss in the simulator, noticed as late: the row beside that of what was measured."""
    name, detected_s = f"{case}: recovery beyond the lost share, predicted", blow.detected_s
    if blow.why is not None or detected_s is None:
        found.row(name, [], "s")
        return
    loss = {"victim": blow.victim, "share": share, "noticed_after_s": detected_s}
    try:
        answer = session.predict(order, session.bed.topology, loss)
    except LoadFailed as error:
        found.not_measured[name] = str(error)
        return
    lost_share_s = expected.checkpoint.nbytes / NIC_BYTES_PER_S
    found.row(name, [answer["seconds"] - answer["lost_s"] - detected_s - lost_share_s], "s")


def _strike(session: Session, server: RatedServer, order: Order, expected: Expected, share: float) -> _Blow:
    nbytes = expected.checkpoint.nbytes
    server.hold_after(server.served().bytes_sent + int(share * nbytes))
    record = session.bed.folder / "record"
    loading = session.begin(order, server, record)
    if not server.wait_until_holding(_HOLDING_S):
        raise LoadFailed(f"storage did not send {share:.0%} of its bytes within {_HOLDING_S:g} s")
    # What storage let go is still on its way: in its buffers, and in the queue of a slow link.
    _wait_until_still(session)
    victim = _receiver(session, loading, nbytes)
    blow = _Blow(victim=victim, off_s=time.monotonic())
    session.bed.host(blow.victim).power_off()
    server.release()
    say(f"{blow.victim} is off")
    try:
        blow.loaded = session.end(loading)
        blow.began_s, blow.ended_s = blow.loaded.began_s, blow.loaded.ended_s
    except LoadFailed as error:
        blow.why = str(error)
        blow.began_s, blow.ended_s = error.began_s or 0.0, error.ended_s or 0.0
    blow.events = _events(record / "events.jsonl")
    return blow


def _receiver(session: Session, loading: LoadingNow, nbytes: int) -> str:
    """The host that takes the largest part in the load, by what came in on its link."""
    moved = session.bed.counters().since(loading.mark).hosts
    names = [host.name for host in session.bed.hosts if host.node.gpus]
    victim = max(names, key=lambda name: moved[name].received_bytes)
    if moved[victim].received_bytes < _RECEIVES * nbytes:
        raise LoadFailed(f"no host has received {_RECEIVES:.0%} of the checkpoint: {moved}")
    return victim


def _wait_until_still(session: Session) -> None:
    """Waits until hardly anything comes in on any link."""
    until_s = time.monotonic() + _SETTLE_S
    moved = _STILL_BYTES
    while moved >= _STILL_BYTES:
        if time.monotonic() > until_s:
            raise LoadFailed(f"links carry bytes {_SETTLE_S:g} s after storage held back")
        mark = session.bed.counters()
        time.sleep(_STILL_S)
        moved = max(one.received_bytes for one in session.bed.counters().since(mark).hosts.values())


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def lost_at(events: list[dict[str, Any]], after_s: float) -> float | None:
    """When a load first was told of a loss, in its seconds: a worker, an agent, a node.

    Args:
        events: Entries of its log.
        after_s: Those before do not count.
    """
    times = [entry["at_s"] for entry in events if "Lost" in entry["event"]["type"] and entry["at_s"] >= after_s]
    return min(times, default=None)


def _rows(found: Found, case: str, blow: _Blow, expected: Expected, undisturbed: list[Loaded]) -> None:
    # Every rank of this mesh holds the whole checkpoint, and its bytes have to come in over a link again.
    lost_share_s = expected.checkpoint.nbytes / NIC_BYTES_PER_S
    detected_s = blow.detected_s
    found.ended(case, [blow.why is None], blow.why)
    found.row(f"{case}: detection", [] if detected_s is None else [detected_s], "s", _DETECTION_TARGET_S)
    recovered: list[float] = []
    if blow.why is None and detected_s is not None:
        recovered = [blow.ended_s - blow.off_s - detected_s - lost_share_s]
    found.row(f"{case}: recovery beyond the lost share", recovered, "s", _RECOVERY_TARGET_S)
    if blow.ended_s:
        found.row(f"{case}: from the blow to the load's end", [blow.ended_s - blow.off_s], "s")
    found.details[case] = {
        "victim": blow.victim,
        "lost_share_s": lost_share_s,
        "undisturbed_s": statistics.median(one.transfer_s for one in undisturbed) if undisturbed else None,
        "ranks_at_the_end": None if blow.loaded is None else [rank.rank for rank in blow.loaded.report.ranks],
        "hosts_at_the_end": None if blow.loaded is None else list(blow.loaded.hosts),
        "events_after": [
            {"at_s": entry["at_s"], **entry["event"]}
            for entry in blow.events or []
            if entry["at_s"] >= blow.off_s - blow.began_s
        ][:20],
    }
