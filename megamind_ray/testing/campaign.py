"""Many loads, each with one damage between storage and arena: what is found, what is repaired, what slips through."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import torch

from megamind_ray.config import Config, IoConfig, RetryConfig, RoutingConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.extent_reader import SourceOpener
from megamind_ray.engine.local_load import load_plan
from megamind_ray.errors import IntegrityError, MegamindError
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.injection import Damage, InjectingStorage, Read
from megamind_ray.testing.oracle import expected_state_dict

__all__ = [
    "ARENA_BYTES",
    "CHUNK_BYTES",
    "DAMAGES",
    "PARALLEL",
    "REMEDIES",
    "Bench",
    "CampaignResult",
    "ChunkDamage",
    "DamageKind",
    "Outcome",
    "Remedy",
    "damage_to",
    "run_campaign",
    "run_clean",
    "two_gpus",
]

CHUNK_BYTES: Final = 64 << 10
PARALLEL: Final = Parallel(tp=2)
ARENA_BYTES: Final = 16 << 20

Outcome = Literal["refused", "repaired", "unnoticed", "harmless", "misnamed"]
"""``refused``: an error; ``repaired``: all tensors right, and a fault in the report; ``unnoticed``: tensors are wrong;
``harmless``: all tensors right, and no fault; ``misnamed``: an error that does not name the damaged chunk."""

DamageKind = Literal["flipped bit", "cut short", "swapped chunk"]
Remedy = Literal["second read", "mirror", "none"]
DAMAGES: Final[tuple[DamageKind, ...]] = ("flipped bit", "cut short", "swapped chunk")
REMEDIES: Final[tuple[Remedy, ...]] = ("second read", "mirror", "none")


@dataclass(frozen=True, slots=True)
class ChunkDamage:
    """Wrong bytes in place of a chunk's.

    Attributes:
        path: Name of the file.
        begin: First byte of the chunk in the file.
        wrong: What comes instead of its bytes.
    """

    path: str
    begin: int
    wrong: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.wrong)

    def __call__(self, read: Read) -> None:
        first, last = max(self.begin, read.offset), min(self.end, read.end)
        if Path(read.uri).name == self.path and first < last:
            read.buffer[first - read.offset : last - read.offset] = self.wrong[first - self.begin : last - self.begin]

    def is_named_by(self, error: MegamindError) -> bool:
        """Whether an error says that just this chunk is wrong."""
        return isinstance(error, IntegrityError) and (error.begin, error.end) == (self.begin, self.end)


@dataclass(frozen=True, slots=True)
class Bench:
    """A small checkpoint, a mirror of it, and what its ranks must hold.

    Attributes:
        own: Its folder.
        mirror: A folder with the same files.
        config: Small chunks, no waits between attempts; with the mirror.
        expected: By rank, the tensors as the safetensors library and torch give them.
    """

    own: Path
    mirror: Path
    config: Config
    expected: tuple[Mapping[str, torch.Tensor], ...]

    @classmethod
    def make(cls, folder: Path, *, recorded: bool = True, through_pool: bool = False) -> Bench:
        """Writes both folders.

        Args:
            folder: Where; empty.
            recorded: Whether checksums are recorded beside the checkpoint.
            through_pool: Every byte is cut into blocks; else ranks read what only they need themselves.
        """
        own = llama_checkpoint(folder / "own", num_layers=3)
        mirror = Path(shutil.copytree(own, folder / "mirror"))
        if recorded:
            manifest = open_manifest(own)
            write_sidecar(record_checksums(manifest, chunk_bytes=CHUNK_BYTES), default_sidecar_path(manifest))
        config = Config(
            io=IoConfig(chunk_bytes=CHUNK_BYTES, extent_bytes=4 * CHUNK_BYTES, read_threads=2, mirrors=(str(mirror),)),
            retry=RetryConfig(attempts=3, first_wait_s=0.0, max_wait_s=0.0),
            routing=RoutingConfig(min_direct_bytes=0, force_pool=through_pool),
        )
        expected = tuple(expected_state_dict(own, PARALLEL, rank) for rank in PARALLEL.ranks)
        return cls(own, mirror, config, expected)

    def without_mirror(self) -> Bench:
        """The same with one source."""
        return replace(self, config=replace(self.config, io=replace(self.config.io, mirrors=())))

    def load(
        self, opener: SourceOpener | None = None, *, folder: Path | None = None, damage: ChunkDamage | None = None
    ) -> Outcome:
        """Loads onto two ranks of this process and compares every bit.

        Args:
            opener: Opens files.
            folder: A changed copy to load in place of ``own``.
            damage: What an error has to name.
        """
        try:
            manifest = open_manifest(folder or self.own)
            plan = build_plan(manifest, build_demands(manifest, PARALLEL), two_gpus(), config=self.config)
            done = load_plan(
                plan, manifest, self.config, [HostArena(ARENA_BYTES) for _ in PARALLEL.ranks], opener=opener
            )
        except MegamindError as error:
            return "refused" if damage is None or damage.is_named_by(error) else "misnamed"
        right = all(map(self.holds, range(len(self.expected)), (session.state_dict() for session in done.sessions)))
        if not right:
            return "unnoticed"
        return "repaired" if done.report.faults else "harmless"

    def holds(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a rank's tensors are the right ones, bit for bit."""
        expected = self.expected[rank]
        return tensors.keys() == expected.keys() and all(
            _bits(tensors[name]) == _bits(tensor) for name, tensor in expected.items()
        )


@dataclass(slots=True)
class CampaignResult:
    """What came of the loads of a campaign.

    Attributes:
        outcomes: By (damage, remedy, outcome).
    """

    outcomes: Counter[tuple[DamageKind, Remedy, Outcome]] = field(default_factory=Counter)

    def count(self, *, remedy: Remedy | None = None, outcome: Outcome | None = None) -> int:
        """Loads with that remedy and outcome."""
        return sum(
            number
            for (_, other_remedy, other_outcome), number in self.outcomes.items()
            if remedy in (None, other_remedy) and outcome in (None, other_outcome)
        )

    @property
    def found(self) -> int:
        """Loads whose damage was repaired or refused."""
        return self.count(outcome="repaired") + self.count(outcome="refused")


def run_campaign(
    bench: Bench, num_injections: int, *, seed: int, on_done: Callable[[int], None] = lambda _done: None
) -> CampaignResult:
    """Loads again and again, with one damage each, kinds and remedies in turn, places by chance.

    Args:
        bench: What to load.
        num_injections: How many loads.
        seed: Of the places.
        on_done: Called after each load with the number of loads so far.
    """
    result = CampaignResult()
    rng = random.Random(seed)
    manifest = open_manifest(bench.own)
    alone = bench.without_mirror()
    for number in range(num_injections):
        kind = DAMAGES[number % len(DAMAGES)]
        remedy = REMEDIES[number // len(DAMAGES) % len(REMEDIES)]
        damage = damage_to(manifest, kind, rng)
        done: Damage = damage
        if remedy == "second read":  # or the third: whatever is left of the attempts
            done = _first_reads(damage, rng.randrange(1, bench.config.retry.attempts))
        elif remedy == "mirror":
            done = _in(bench.own, damage)
        loads = alone if remedy == "second read" else bench
        # Every other one read as from a disk: several chunks at a time.
        outcome = loads.load(InjectingStorage(done, long_reads=number % 2 == 1), damage=damage)
        result.outcomes[kind, remedy, outcome] += 1
        on_done(number + 1)
    return result


def run_clean(bench: Bench, num_loads: int) -> Counter[Outcome]:
    """Loads without any damage: every outcome other than ``harmless`` is a false alarm, or worse."""
    return Counter(bench.load(InjectingStorage(long_reads=number % 2 == 1)) for number in range(num_loads))


def damage_to(manifest: Manifest, kind: DamageKind, rng: random.Random) -> ChunkDamage:
    """A damage to one chunk, which is sure to change its bytes.

    Args:
        manifest: A checkpoint on the chunk grid of ``CHUNK_BYTES``.
        kind: What happens to it.
        rng: Chooses the chunk and the place in it.
    """
    file = rng.randrange(len(manifest.files))
    chunks = list(_chunks(manifest, file))
    begin, end = rng.choice(chunks)
    stored = Path(manifest.file_uri(file)).read_bytes()
    right = stored[begin:end]
    wrong = bytearray(right)
    while wrong == right:
        if kind == "flipped bit":
            bit = rng.randrange(8 * len(wrong))
            wrong[bit // 8] ^= 1 << bit % 8
        elif kind == "cut short":  # and nobody says so: what lay in the buffer stays there
            kept = rng.randrange(len(wrong))
            wrong[kept:] = b"\xa5" * (len(wrong) - kept)
        else:
            other = rng.choice(chunks)[0]
            wrong[:] = (stored[other:] + stored)[: len(wrong)]
    return ChunkDamage(manifest.files[file].path, begin, bytes(wrong))


def _chunks(manifest: Manifest, file: int) -> Iterator[tuple[int, int]]:
    info = manifest.files[file]
    for begin in range(info.data_begin, info.size_bytes, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, info.size_bytes)


def _first_reads(damage: Damage, times: int) -> Damage:
    def limited(read: Read) -> None:
        if read.number <= times:
            damage(read)

    return limited


def _in(folder: Path, damage: Damage) -> Damage:
    def limited(read: Read) -> None:
        if Path(read.uri).is_relative_to(folder):
            damage(read)

    return limited


def two_gpus() -> Topology:
    """A machine for ``PARALLEL``."""
    gpus = tuple(Gpu(index=index, memory_bytes=1 << 30, free_bytes=1 << 30) for index in range(PARALLEL.world))
    return Topology(nodes=(Node(id=NodeId("n0"), gpus=gpus, memory_bytes=8 << 30, pool_bytes=1 << 30),))


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()
