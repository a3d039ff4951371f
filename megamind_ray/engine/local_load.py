"""A whole plan in one process, without Ray: what node agents and workers do, with threads in place of actors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.recorder import MAX_SPANS, NO_RECORD, Recorder
from megamind_ray.core.recording import measured_timeline
from megamind_ray.core.report import LoadReport, Verified
from megamind_ray.core.timeline import Timeline
from megamind_ray.core.tracks import NodeRecorder, device_series, rank_track
from megamind_ray.device.arena import Arena
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.engine.extent_reader import ExtentReader, SourceOpener
from megamind_ray.engine.session import RankSession
from megamind_ray.engine.team import run_team
from megamind_ray.errors import RequestError, masked
from megamind_ray.planning.compile import compile_agent, compile_rank

__all__ = ["LocalLoad", "load_plan"]

_LOAD = LoadId("local#0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoad:
    """What a load in one process gave.

    Attributes:
        sessions: By rank, finished.
        report: What was read and written.
        timeline: What happened when, where that was recorded.
    """

    sessions: tuple[RankSession, ...]
    report: LoadReport
    timeline: Timeline | None = None


def load_plan(
    plan: Plan,
    manifest: Manifest,
    config: Config,
    arenas: Sequence[Arena],
    *,
    opener: SourceOpener | None = None,
    stop: threading.Event | None = None,
    record: bool = False,
) -> LocalLoad:
    """Executes a plan: every extent is read once, its blocks go to all sessions that need them.

    A block is applied as soon as it is cut, so bytes in flight are bounded by ``config.io.reads_in_flight`` extents
    and blocks. The first error stops everything and gives all arenas back.

    Args:
        plan: What to move.
        manifest: The checkpoint that it was made for.
        config: Threads and retries.
        arenas: One per rank; several ranks may share one.
        opener: Opens files; by default ``io.open_source`` with the settings of ``config``.
        stop: Set from outside, it ends the load early.
        record: Whether to record a timeline.

    Raises:
        RequestError: Not one arena per rank.
        CapacityError: An arena has no room.
        IntegrityError, SourceError: Bytes are wrong, or cannot be read.
        ClusterError: ``stop`` was set.
    """
    if len(arenas) != plan.parallel.world:
        raise RequestError(f"{len(arenas)} arenas for {plan.parallel.world} ranks; give one for each rank")
    started_at, started_s = datetime.now(UTC), time.perf_counter()
    recorder = Recorder(lambda: time.perf_counter() - started_s) if record else NO_RECORD
    with contextlib.ExitStack() as on_error:
        sessions = []
        for rank, arena in enumerate(arenas):
            program = compile_rank(plan, manifest, Rank(rank), _LOAD)
            sessions.append(RankSession(program, arena, config, opener=opener, recorder=recorder))
            on_error.callback(sessions[-1].release)
        agents = [
            _Agent(_agent_program(plan, manifest, node), sessions, config, opener, stop, recorder)
            for node in dict.fromkeys(plan.tables["extents"]["node"].to_pylist())
        ]
        with contextlib.ExitStack() as readers:
            for agent in agents:
                readers.callback(agent.reader.close)
            transfer_s = time.perf_counter()
            run_team(
                _work(agents, sessions),
                _call,
                num_threads=config.io.reads_in_flight(manifest.root),
                name="local-load",
                stop=stop,
                on_failure=partial(_end_reading, agents, sessions),
            )
            for agent in agents:
                agent.reader.check_unchanged()
        for session in sessions:
            session.finish()
            recorder.mark("rank_done", rank_track(session.program.rank))
        seconds = {"transfer": time.perf_counter() - transfer_s, "total": time.perf_counter() - started_s}
        on_error.pop_all()
    return LocalLoad(
        sessions=tuple(sessions),
        report=_report(plan, manifest, agents, sessions, started_at, seconds),
        timeline=_timeline(plan, recorder) if record else None,
    )


class _Agent:
    """A node agent's reading and cutting; blocks go straight to the sessions."""

    def __init__(
        self,
        program: AgentProgram,
        sessions: Sequence[RankSession],
        config: Config,
        opener: SourceOpener | None,
        stop: threading.Event | None,
        recorder: Recorder,
    ) -> None:
        self.program = program
        self.record = NodeRecorder(recorder, program.node)
        self.reader = ExtentReader(program.files, config, opener=opener, stop=stop, on_fault=self.record.fault)
        self.verified: Verified = "reference"
        self._sessions = sessions
        self._cutter = BlockCutter(program.blocks, program.segments)
        self._consumers = dict(zip(program.blocks.block.tolist(), program.blocks.consumers.tolist(), strict=True))

    def read(self, row: int) -> None:
        """Reads an extent and applies its blocks."""
        extents = self.program.extents
        begin, end = int(extents.begin[row]), int(extents.end[row])
        file, begin_s = int(extents.file[row]), self.record.now()
        with self.reader.staged(file, begin, end) as extent:
            name = self.program.files.files[file].path
            self.record.read(begin_s, end - begin, file=name, verified=extent.verified)
            if extent.verified != "reference":
                self.verified = extent.verified
            begin_s = self.record.now()
            for block in self._cutter.cut(int(extents.extent[row]), begin, extent.data):
                self.record.cut(begin_s, block.data.nbytes, block=block.block)
                for rank in self.program.consumer_sets[self._consumers[block.block]]:
                    self._sessions[rank].apply(block.block, block.data, block.crc32)
                begin_s = self.record.now()


def _agent_program(plan: Plan, manifest: Manifest, node: str) -> AgentProgram:
    return compile_agent(plan, manifest, NodeId(node), _LOAD, credit_bytes=0, keep_blocks=np.empty(0, np.int64))


def _work(agents: Sequence[_Agent], sessions: Sequence[RankSession]) -> Iterable[Callable[[], None]]:
    """All extents, each reader's in its own order, readers taking turns as they would on their own machines."""
    queues = [[partial(agent.read, row) for row in range(len(agent.program.extents))] for agent in agents]
    queues += [
        [partial(session.read_extent, row) for row in range(len(session.program.extents))] for session in sessions
    ]
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                yield queue[turn]


def _end_reading(agents: Sequence[_Agent], sessions: Sequence[RankSession]) -> None:
    for agent in agents:
        agent.reader.stop()
    for session in sessions:
        session.stop()


def _call(action: Callable[[], None]) -> None:
    action()


def _timeline(plan: Plan, recorder: Recorder) -> Timeline:
    ranks = plan.tables["ranks"].select(["rank", "node", "arena_bytes"]).to_pylist()
    return measured_timeline(
        [recorder.page(limit=MAX_SPANS)],
        node_of_rank={row["rank"]: row["node"] for row in ranks},
        limits={device_series(row["rank"]): float(row["arena_bytes"]) for row in ranks},
    )


def _report(
    plan: Plan,
    manifest: Manifest,
    agents: Sequence[_Agent],
    sessions: Sequence[RankSession],
    started_at: datetime,
    seconds: dict[str, float],
) -> LoadReport:
    reads = [agent.reader.counters.totals() for agent in agents] + [session.reads for session in sessions]
    checks = [agent.verified for agent in agents] + [session.verified for session in sessions]
    faults = [fault for agent in agents for fault in agent.reader.faults]
    faults += [fault for session in sessions for fault in session.faults]
    ranks = plan.tables["ranks"]
    places = zip(ranks["node"].to_pylist(), ranks["gpu"].to_pylist(), strict=True)
    bytes_read = sum(total.payload_bytes for total in reads)
    to_device = sum(session.bytes_to_device for session in sessions)
    return LoadReport(
        model=masked(plan.uri).rstrip("/").rpartition("/")[2],
        uri=masked(plan.uri),
        parallel=asdict(plan.parallel),
        started_at=started_at.isoformat(),
        bytes_total=plan.bytes_total,
        bytes_from_storage=bytes_read,
        bytes_headers=manifest.header_bytes,
        bytes_retried=sum(total.retried_bytes for total in reads),
        bytes_to_device=to_device,
        bytes_replicated=to_device - plan.bytes_total,
        seconds=seconds,
        throughput_bytes_per_s=bytes_read / seconds["transfer"] if bytes_read else 0.0,
        ranks=tuple(session.report(node=node, gpu=gpu) for session, (node, gpu) in zip(sessions, places, strict=True)),
        faults=tuple(faults),
        verified="reference" if manifest.reference and all(check == "reference" for check in checks) else "transit",
        notes=plan.notes,
    )
