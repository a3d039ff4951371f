"""Rounds: every contender once in turns, the page cache and the memory put into the same state before each."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._checkpoint import Checkpoint, wrong_tensors
from benchmarks._contenders import Contender, Loaded, Recycled, UnavailableError, limit, tensors_of
from benchmarks._host_pages import back_free_memory
from benchmarks._limit import READS, Variant, Way, calibrate
from benchmarks._page_cache import PageCacheError, evict, fill

__all__ = [
    "SETTINGS",
    "Outcome",
    "Setting",
    "find_limit",
    "in_words",
    "require_memory",
    "run_rounds",
    "say",
    "settle",
    "timed",
]

_SPARE_BYTES = 1 << 30
_MAX_REASONS = 3
_BEGIN_S = time.monotonic()
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where the bytes are before a load, and what memory they go to.

    Attributes:
        name: In the results.
        cold: The files are not in the page cache, else they are, wholly.
        recycled: Into memory that was used before, else into fresh memory.
    """

    name: str
    cold: bool
    recycled: bool


SETTINGS = (
    Setting(name="cold", cold=True, recycled=False),
    Setting(name="warm", cold=False, recycled=False),
    Setting(name="recycled", cold=False, recycled=True),
    Setting(name="cold-recycled", cold=True, recycled=True),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the rounds of one setting gave.

    Attributes:
        seconds: By contender, one for each round; contenders that failed are not in it.
        states: By contender: ``ok``, or in words why it has no figures, or what is wrong with which tensors.
        wrong: By contender, how many tensors were wrong or mappings, in the round before those that count.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)


def say(text: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGIN_S:6.1f} s  {text}", file=sys.stderr, flush=True)


def require_memory(checkpoint: Checkpoint, setting: Setting) -> None:
    """Refuses a setting that the machine has no memory for, before the system kills somebody.

    Raises:
        PageCacheError: Too little is free.
    """
    # The page cache, what is loaded, and where it is loaded to: the buffer of the peers and our arena.
    copies = 4 if setting.recycled else 2
    needed_bytes = copies * checkpoint.nbytes + min(_SPARE_BYTES, checkpoint.nbytes)
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    if available_bytes < needed_bytes:
        raise PageCacheError(
            f"{needed_bytes / 1e9:.1f} GB of memory are needed, {available_bytes / 1e9:.1f} GB are available; "
            "give a smaller --size"
        )


def settle() -> None:
    """Gives what earlier loads left behind to the system, the C library's free lists included: fresh is fresh."""
    gc.collect()
    _libc.malloc_trim(0)


def timed(
    checkpoint: Checkpoint, contender: Contender, setting: Setting, recycled: Recycled | None
) -> tuple[float, Loaded]:
    """Loads once: the seconds, and what was loaded.

    Raises:
        UnavailableError, ImportError: The contender has no such load.
        PageCacheError: The setting cannot be made.
    """
    settle()
    load = contender.prepare(checkpoint, recycled)
    (evict if setting.cold else fill)(checkpoint.files)
    # What a load takes: the tensors, the page cache of what it reads, and a file's worth of buffers.
    back_free_memory(round(checkpoint.nbytes * (0.25 + (not setting.recycled) + setting.cold)))
    begin = time.perf_counter()
    loaded = load()
    return time.perf_counter() - begin, loaded


def find_limit(
    checkpoint: Checkpoint,
    setting: Setting,
    recycled: Recycled | None,
    *,
    ways: tuple[Way, ...] = READS,
    quick: bool,
) -> Variant:
    """The fastest of some ways to read in this setting."""

    def seconds(variant: Variant) -> float:
        taken = timed(checkpoint, limit(variant), setting, recycled)[0]
        say(f"{setting.name}, what the limit is: {checkpoint.nbytes / taken / 1e9:.2f} GB/s with {variant}")
        return taken

    return calibrate(seconds, ways=ways, fresh=recycled is None, quick=quick)


def run_rounds(
    checkpoint: Checkpoint,
    contenders: Sequence[Contender],
    setting: Setting,
    recycled: Recycled | None,
    *,
    num_rounds: int,
) -> Outcome:
    """One round that is checked and not counted, then the others.

    A peer that fails is left out from then on and its state says why; if the limit or we fail, so does the benchmark.

    Raises:
        PageCacheError: The setting cannot be made.
    """
    outcome = Outcome()
    for index in range(num_rounds + 1):
        running = [one for one in contenders if outcome.states.get(one.name, "ok") == "ok" or one.name in outcome.wrong]
        random.Random(index).shuffle(running)  # so that nobody always follows the same neighbour
        for contender in running:
            _take_turn(checkpoint, contender, setting, recycled, outcome, counts=index > 0)
        rates = (f"{name} {checkpoint.nbytes / taken[-1] / 1e9:.2f}" for name, taken in outcome.seconds.items())
        say(f"{setting.name}, round {index} of {num_rounds}, GB/s: {', '.join(rates) or 'checked, not counted'}")
    return outcome


def in_words(wrong: Sequence[str], num_tensors: int) -> str:
    """What is the matter with how many tensors: a mapping of the files is no wrong tensor, and not what was asked for.

    Args:
        wrong: As ``wrong_tensors`` gives them.
        num_tensors: Of the checkpoint.
    """
    names: dict[str, list[str]] = {}
    for line in wrong:
        name, _, reason = line.partition(": ")
        names.setdefault(reason, []).append(name)
    said = [
        f"{len(found)} of {num_tensors} tensors: each {reason} (the first: {found[0]})"
        for reason, found in names.items()
    ]
    more = [f"{len(said) - _MAX_REASONS} more reasons"] if len(said) > _MAX_REASONS else []
    return "; ".join([*said[:_MAX_REASONS], *more])


def _take_turn(
    checkpoint: Checkpoint,
    contender: Contender,
    setting: Setting,
    recycled: Recycled | None,
    outcome: Outcome,
    *,
    counts: bool,
) -> None:
    name = contender.name
    try:
        seconds, loaded = timed(checkpoint, contender, setting, recycled)
    except (UnavailableError, ImportError) as error:
        outcome.states[name] = f"not available: {error}"
    except PageCacheError:
        raise
    except Exception as error:  # whatever a peer raises is its result
        if contender.kind in ("limit", "ours"):
            raise
        outcome.states[name] = f"failed: {type(error).__name__}: {error}"
    else:
        if counts:
            outcome.seconds.setdefault(name, []).append(seconds)
            return
        fill(checkpoint.files)  # faster than page by page
        wrong = wrong_tensors(checkpoint, tensors_of(loaded))
        outcome.wrong[name] = len(wrong)
        outcome.states[name] = in_words(wrong, len(checkpoint.places)) if wrong else "ok"
        return
    outcome.seconds.pop(name, None)
    outcome.wrong.pop(name, None)
    say(f"{setting.name}: {name} {outcome.states[name]}")
