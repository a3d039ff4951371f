"""A bed with Ray and a driver on it, for the cluster benchmark: loads with what they moved, exactly counted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import megamind_ray as mm
from benchmarks._checkpoint import Checkpoint, open_checkpoint
from megamind_ray.core.topology import Topology
from megamind_ray.planning.topology_dump import dump_topology
from megamind_ray.testing.architectures import llama_specs
from megamind_ray.testing.checkpoints import write_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.rated_server import RatedServer, Sent
from megamind_ray.testing.testbed import Bed, Counters, Program
from megamind_ray.units import GIB, KIB, MIB

__all__ = [
    "SETTINGS",
    "Expected",
    "LoadFailed",
    "Loaded",
    "LoadingNow",
    "Order",
    "Session",
    "say",
    "weight_bytes",
    "write_model",
]

# To the tensors of this model as the defaults are to those of an 8B model: a slice of a projection has several chunks.
SETTINGS: Final[Mapping[str, Mapping[str, object]]] = {"io": {"chunk_bytes": 256 * KIB, "extent_bytes": 4 * MIB}}
LOAD_S: Final = 240.0
_ANSWER_S: Final = 120.0
_START_S: Final = 180.0
_POLL_S: Final = 0.01
_ROOT: Final = Path(__file__).parent.parent
Settings = Mapping[str, Mapping[str, object]]


class LoadFailed(Exception):
    """A load, or something around it, that did not end well; the text says how.

    Attributes:
        began_s, ended_s: Of the load, on the monotonic clock; None where the driver did not say.
    """

    def __init__(self, reason: str, *, began_s: float | None = None, ended_s: float | None = None) -> None:
        super().__init__(reason)
        self.began_s, self.ended_s = began_s, ended_s


def write_model(folder: Path, total_bytes: int) -> Checkpoint:
    """A Llama of about this size in four files, with heads that four ranks can share."""
    width, vocabulary = 768, 4000
    layer_bytes = 2 * (2 + 2 / 3 + 9) * width**2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "vocab_size": vocabulary,
        "head_dim": 64,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": max(1, round((total_bytes - 2 * vocabulary * width) / layer_bytes)),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(folder, llama_specs(config), config, num_files=4)
    return open_checkpoint(folder)


def weight_bytes(sent: Sequence[Sent], checkpoint: Checkpoint) -> int:
    """Bytes of tensors that a server sent: without the headers, and what was sent twice counts twice."""
    begins = {path.name: path.stat().st_size for path in checkpoint.files}
    for place in checkpoint.places:
        name = checkpoint.files[place.file].name
        begins[name] = min(begins[name], place.begin)
    return sum(max(0, one.end - max(one.begin, begins[one.path])) for one in sent if one.path in begins)


class Expected:
    """What ranks have to hold, by the files' own bytes.

    Args:
        checkpoint: The files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._known: dict[tuple[str, int], Any] = {}

    def digests(self, parallel: mm.Parallel, rank: int) -> Any:
        """Digests by name, as JSON has them."""
        key = (str(parallel), rank)
        if key not in self._known:
            tensors = expected_state_dict(self.checkpoint.folder, parallel, rank)
            self._known[key] = json.loads(json.dumps(digest_all(tensors)))
        return self._known[key]

    def bytes_of(self, parallel: mm.Parallel, ranks: Sequence[int]) -> int:
        """Bytes of the checkpoint that these ranks need together, each counted once; of a mesh without ``pp``."""
        coords = sorted({int(parallel.coords(rank).tp) for rank in ranks})
        if not coords:
            return 0
        own = {tp: self._rank_bytes(parallel, tp) for tp in range(parallel.tp)}
        # What all have is counted once, the rest is divided among them.
        shared = (sum(own.values()) - self.checkpoint.nbytes) // max(1, parallel.tp - 1)
        return sum(own[tp] for tp in coords) - (len(coords) - 1) * shared

    def _rank_bytes(self, parallel: mm.Parallel, rank: int) -> int:
        tensors = expected_state_dict(self.checkpoint.folder, parallel, rank)
        names = {place.name for place in self.checkpoint.places}  # a tied weight has a second name
        return sum(tensor.nbytes for name, tensor in tensors.items() if name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A load.

    Attributes:
        uri: Path or URI as the hosts know it.
        parallel: The mesh.
        settings: Beside those of all loads.
    """

    uri: str
    parallel: mm.Parallel
    settings: Settings = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        mesh = {name: getattr(self.parallel, name) for name in ("tp", "pp", "dp")}
        return {"uri": self.uri, "mesh": mesh, "settings": self.settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A load that ended well: every rank of it holds the files' bytes.

    Attributes:
        report: Its own words.
        moved: On the links, from before it began until it ended.
        storage_bytes: Bytes of tensors that the web server sent; 0 without one.
        hosts: Of the ranks, in their order.
        began_s, ended_s: On the monotonic clock of the machine.
        busy: Share of the machine's processors that anybody used meanwhile: near 1, they are what was measured.
    """

    report: mm.LoadReport
    moved: Counters
    storage_bytes: int
    hosts: tuple[str, ...]
    began_s: float
    ended_s: float
    busy: float

    @property
    def transfer_s(self) -> float:
        return self.report.seconds["transfer"]

    def received_by(self, host: str) -> int:
        """Bytes that came in on its link."""
        return self.moved.hosts[host].received_bytes


class Session:
    """A bed, its Ray, and a driver on its first host.

    Attributes:
        bed: The bed.

    Args:
        topology: Of the bed.
        expected: What ranks have to hold.
    """

    def __init__(self, topology: Topology, expected: Expected) -> None:
        self._expected = expected
        self.bed = Bed(topology)
        try:
            self.bed.start_ray()
            self._num_jobs = 0
            self._start_job()
        except BaseException:
            self.bed.close()
            raise

    def load(self, order: Order, server: RatedServer | None = None) -> Loaded:
        """Loads, compares what every rank holds, and unloads.

        Raises:
            LoadFailed: Anything of that went wrong. The next load has a new driver.
        """
        with self._anew_after_failure():
            handle = self.begin(order, server)
            loaded = self.end(handle)
            self._ask({"do": "unload"})
            return loaded

    def begin(self, order: Order, server: RatedServer | None = None, record: Path | None = None) -> LoadingNow:
        """Begins a load and does not wait for it."""
        mark = self.bed.counters()
        num_sent = len(server.served().sent) if server else 0
        where = None if record is None else str(record)
        number = self._order({"do": "load", **order.to_json(), "record": where})
        return LoadingNow(order, server, mark, num_sent, number, _worked_s(), time.monotonic())

    def end(self, handle: LoadingNow, *, require_all: bool = True) -> Loaded:
        """Waits for the load and compares what ranks hold.

        Args:
            handle: Of ``begin``.
            require_all: Every rank of the mesh has to be there; else those that the report names.

        Raises:
            LoadFailed: It failed, or a rank holds something else.
        """
        answer = self._answer(handle.number, LOAD_S)
        moved = self.bed.counters().since(handle.mark)
        there_was_s = (time.monotonic() - handle.begin_s) * (os.cpu_count() or 1)
        busy = (_worked_s() - handle.worked_s) / there_was_s
        report = mm.LoadReport.from_json(answer["report"])
        self._require_exact(handle.order.parallel, report, require_all=require_all)
        # Only now: the server counts an answer a moment after its last byte has arrived.
        sent = handle.server.served().sent[handle.num_sent :] if handle.server else ()
        addresses = {host.address: host.name for host in self.bed.hosts}
        nodes = self._ask({"do": "nodes"})["nodes"]
        return Loaded(
            report=report,
            moved=moved,
            storage_bytes=weight_bytes(sent, self._expected.checkpoint),
            hosts=tuple(addresses[nodes[rank.node]] for rank in report.ranks),
            began_s=answer["began_s"],
            ended_s=answer["ended_s"],
            busy=round(busy, 3),
        )

    def predict(self, order: Order, topology: Topology, loss: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Predicted seconds, the bottleneck, and the hosts of the ranks.

        Args:
            order: The load.
            topology: What the hosts can do.
            loss: ``victim``, ``share`` of storage's bytes after which it goes, ``noticed_after_s``.

        Raises:
            LoadFailed: It cannot be planned or simulated.
        """
        # Hosts without GPUs have no part in a load, unless they have the files.
        hardware = replace(topology, nodes=tuple(node for node in topology.nodes if node.gpus or node.disks))
        path = self.bed.folder / f"topology-{time.monotonic_ns()}.toml"
        path.write_text(dump_topology(hardware))
        return self._ask({"do": "predict", **order.to_json(), "topology": str(path), "loss": loss})

    def wires(self, settings: Settings) -> Mapping[str, Any]:
        """``bytes_per_s`` from host to host by wire, and what there is to say about one that is ``missing``.

        Raises:
            LoadFailed: They cannot be measured.
        """
        return self._ask({"do": "wires", "settings": settings})

    def close(self) -> None:
        """Ends everything."""
        self.bed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_exact(self, parallel: mm.Parallel, report: mm.LoadReport, *, require_all: bool) -> None:
        held = self._ask({"do": "digests"})["held"]
        ranks = [rank.rank for rank in report.ranks]
        if len(held) != len(ranks) or (require_all and ranks != list(parallel.ranks)):
            raise LoadFailed(f"the report names the ranks {ranks}, {len(held)} answered, the mesh is {parallel}")
        for rank, found in zip(ranks, held, strict=True):
            wanted = self._expected.digests(parallel, rank)
            if found != wanted:
                wrong = [name for name in wanted if found.get(name) != wanted[name]] or sorted({*found} - {*wanted})
                raise LoadFailed(f"rank {rank} has other bytes than the files in {len(wrong)} tensors, as {wrong[0]}")

    # The driver.

    def _start_job(self) -> None:
        self._folder = self.bed.folder / f"job-{self._num_jobs}"
        self._folder.mkdir()
        # What an operator knows of a cluster: its racks and the rates of its links.
        known = self._folder / "topology.toml"
        known.write_text(dump_topology(self.bed.topology))
        settings = {**SETTINGS, "plan": {"topology": str(known)}}
        self._num_jobs += 1
        self._num_orders = 0
        words = [str(self._folder), json.dumps(settings), str(GIB)]
        self._job: Program = self.bed.head.start(sys.executable, "-m", "benchmarks._cluster_job", *words, cwd=_ROOT)

    @contextmanager
    def _anew_after_failure(self) -> Iterator[None]:
        try:
            yield
        except LoadFailed:
            self._job.kill()
            self._start_job()
            raise

    def _order(self, order: Mapping[str, Any]) -> int:
        number, self._num_orders = self._num_orders, self._num_orders + 1
        draft = self._folder / f"order-{number}.draft"
        draft.write_text(json.dumps(order))
        draft.rename(self._folder / f"order-{number}.json")
        return number

    def _answer(self, number: int, timeout_s: float) -> dict[str, Any]:
        path = self._folder / f"answer-{number}.json"
        # The first answer waits for the driver, its connection and the fleet.
        until_s = time.monotonic() + timeout_s + (_START_S if number == 0 else 0.0)
        while not path.exists():
            if not self._job.is_running and not path.exists():
                raise LoadFailed(f"the driver ended: {self._job.errors[-1500:]}")
            if time.monotonic() > until_s:
                raise LoadFailed(f"no answer within {timeout_s:g} s; the driver said: {self._job.errors[-1500:]}")
            time.sleep(_POLL_S)
        answer: dict[str, Any] = json.loads(path.read_text())
        if "error" in answer:
            raise LoadFailed(answer["error"], began_s=answer.get("began_s"), ended_s=answer.get("ended_s"))
        return answer

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer(self._order(order), _ANSWER_S)


@dataclass(frozen=True, slots=True)
class LoadingNow:
    """A load that goes on."""

    order: Order
    server: RatedServer | None
    mark: Counters
    num_sent: int
    number: int
    worked_s: float
    begin_s: float


def _worked_s() -> float:
    """Processor time that was used by anybody since the machine started: user, nice, system, irq, softirq."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return sum(int(fields[index]) for index in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    """A line on stderr, with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
