"""What can go wrong with bytes on their way, one trial at a time: which of it is found, and which cannot be."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.program import AgentProgram
from megamind_ray.device.arena import HostArena
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.cut import BlockCutter, CutBlock
from megamind_ray.engine.extent_reader import ExtentReader
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import IntegrityError
from megamind_ray.io import ShortReadError, open_manifest
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.planning.compile import compile_agent, compile_rank
from megamind_ray.testing.campaign import ARENA_BYTES, PARALLEL, Bench, DamageKind, Outcome, damage_to, two_gpus
from megamind_ray.testing.injection import InjectingStorage, Read

__all__ = ["TRIALS", "Trial"]

Trial = Callable[[Bench, Path, random.Random], Outcome]
"""One load with one thing that goes wrong. Takes what to load, an empty folder, where it happens."""

Place = Literal["staging", "block", "device"]

_LOAD: Final = LoadId("blind-spots#1")
_NODE: Final = NodeId("n0")


def _copy(bench: Bench, folder: Path) -> Path:
    return Path(shutil.copytree(bench.own, folder / "copy"))


def _data_file(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.safetensors"))))


def _flip_on_disk(path: Path, begin: int, end: int, rng: random.Random) -> None:
    """Changes one bit, and nothing that the file system tells of the file: how a disk rots."""
    times = path.stat()
    with path.open("r+b") as file:
        place = rng.randrange(begin, end)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _rotten_data(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    copy = _copy(bench, folder)
    info = open_manifest(copy).files[0]
    _flip_on_disk(_data_file(copy), info.data_begin, info.size_bytes, rng)
    return bench.load(folder=copy)


def _rotten_header(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    copy = _copy(bench, folder)
    _flip_on_disk(_data_file(copy), 0, open_manifest(copy).files[0].data_begin, rng)
    return bench.load(folder=copy)


def _truncated(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    copy = _copy(bench, folder)
    info = open_manifest(copy).files[0]
    os.truncate(_data_file(copy), rng.randrange(info.data_begin, info.size_bytes))
    return bench.load(folder=copy)


def _storage_gives(kind: DamageKind, *, once: bool) -> Trial:
    """Every read of a chunk comes wrong, or the first one does."""

    def trial(bench: Bench, _folder: Path, rng: random.Random) -> Outcome:
        damage = damage_to(open_manifest(bench.own), kind, rng)

        def done(read: Read) -> None:
            if read.number == 1 or not once:
                damage(read)

        return bench.load(InjectingStorage(done))

    return trial


def _short_read(bench: Bench, _folder: Path, rng: random.Random) -> Outcome:
    """Storage gives fewer bytes once, and says so."""
    chosen, left = rng.randrange(8), threading.Semaphore(1)
    count = iter(range(1 << 30))

    def damage(read: Read) -> None:
        if next(count) >= chosen and left.acquire(blocking=False):
            raise ShortReadError(f"{read.buffer.nbytes // 2} bytes came of {read.buffer.nbytes}")

    return bench.load(InjectingStorage(damage))


def _written_over(*, time_is_set_back: bool) -> Trial:
    """Somebody writes other weights into the file while it is loaded."""

    def trial(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
        copy = _copy(bench, folder)
        path, info = _data_file(copy), open_manifest(copy).files[0]
        times, once = path.stat(), threading.Semaphore(1)
        begin = rng.randrange((info.data_begin + info.size_bytes) // 2, info.size_bytes - 4096)

        def overwrite(read: Read) -> None:
            if read.uri == str(path) and once.acquire(blocking=False):
                with path.open("r+b") as file:
                    file.seek(begin)
                    file.write(rng.randbytes(4096))
                if time_is_set_back:
                    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        return bench.load(InjectingStorage(overwrite), folder=copy)

    return trial


def _in_memory(place: Place) -> Trial:
    """One bit flips in this process's memory, at one place of the way through blocks."""

    def trial(bench: Bench, _folder: Path, rng: random.Random) -> Outcome:
        manifest = open_manifest(bench.own)
        plan = build_plan(manifest, build_demands(manifest, PARALLEL), two_gpus(), config=bench.config)
        program = compile_agent(plan, manifest, _NODE, _LOAD, credit_bytes=0, keep_blocks=np.empty(0, np.int64))
        sessions = [
            RankSession(compile_rank(plan, manifest, Rank(rank), _LOAD), HostArena(ARENA_BYTES), bench.config)
            for rank in PARALLEL.ranks
        ]
        is_found = _hand_out(program, sessions, bench.config, place, rng)
        for session in sessions:
            session.finish()
        tensors = [session.state_dict() for session in sessions]
        if place == "device":
            largest = max(tensors[0].values(), key=lambda tensor: tensor.nbytes)
            _flip(largest.reshape(-1).view(torch.uint8).numpy(), rng)
        if not all(map(bench.holds, range(len(tensors)), tensors)):
            return "unnoticed"
        return "repaired" if is_found else "harmless"

    return trial


def _hand_out(
    program: AgentProgram, sessions: Sequence[RankSession], config: Config, place: Place, rng: random.Random
) -> bool:
    """Reads, cuts and applies everything; whether a damage was found on the way, after which the block comes again."""
    reader, cutter = ExtentReader(program.files, config), BlockCutter(program.blocks, program.segments)
    consumers = dict(zip(program.blocks.block.tolist(), program.blocks.consumers.tolist(), strict=True))
    columns = (getattr(program.extents, name).tolist() for name in ("extent", "file", "begin", "end"))
    victim, is_found = rng.randrange(len(program.extents)), False
    for row, (extent, file, begin, end) in enumerate(zip(*columns, strict=True)):
        with reader.staged(file, begin, end) as read:
            if place == "staging" and row == victim:
                _flip(read.data, rng)
            for number, block in enumerate(cutter.cut(extent, begin, read.data)):
                takers = [sessions[rank] for rank in program.consumer_sets[consumers[block.block]]]
                if place == "block" and row == victim and number == 0:
                    is_found = _arrives_damaged(takers, block, rng)
                for session in takers:
                    session.apply(block.block, block.data, block.crc32)
    reader.close()
    return is_found


def _arrives_damaged(takers: Sequence[RankSession], block: CutBlock, rng: random.Random) -> bool:
    """Whether a rank refuses a block that changed after it was cut: the one does that takes what changed."""
    data, is_refused = block.data.copy(), False
    _flip(data, rng)
    for session in takers:
        try:
            session.apply(block.block, data, block.crc32)
        except IntegrityError:
            is_refused = True
    return is_refused


def _flip(data: Bytes, rng: random.Random) -> None:
    data[rng.randrange(data.nbytes)] ^= np.uint8(1 << rng.randrange(8))


TRIALS: Final[Mapping[str, Trial]] = {
    "a bit of the weights rots in storage": _rotten_data,
    "a bit of the header rots in storage": _rotten_header,
    "the file ends too early": _truncated,
    "storage flips a bit, once": _storage_gives("flipped bit", once=True),
    "storage flips a bit, each time": _storage_gives("flipped bit", once=False),
    "storage gives another chunk, once": _storage_gives("swapped chunk", once=True),
    "storage gives another chunk, each time": _storage_gives("swapped chunk", once=False),
    "a read is cut short, and storage says so": _short_read,
    "a read is cut short in silence, once": _storage_gives("cut short", once=True),
    "the file is written over during the load": _written_over(time_is_set_back=False),
    "as before, and its time is set back": _written_over(time_is_set_back=True),
    "a bit flips in the staging buffer after the check": _in_memory("staging"),
    "a bit of a block flips between cut and arrival": _in_memory("block"),
    "a bit flips in device memory after arrival": _in_memory("device"),
}
"""What goes wrong, in words -> the trial."""
