"""Where the system gives no further thread (``ulimit -u``), those that are there do the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megamind_ray as mm
from megamind_ray.device.arena import HostArena
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, verify_checksums, write_sidecar
from megamind_ray.io.pools import submit
from megamind_ray.io.request_pool import _pool, run_requests
from megamind_ray.units import MIB

BOUND_S = 30.0


@pytest.fixture
def allow_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many threads can still be started; pools that earlier tests filled are forgotten."""
    start = threading.Thread.start
    left = 0

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    def allow(number: int) -> None:
        nonlocal left
        left = number
        _pool.cache_clear()
        monkeypatch.setattr(threading.Thread, "start", limited)

    return allow


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for number in range(4):
        data = np.random.default_rng(number).integers(0, 255, 3 * MIB, np.uint8)
        save_file({f"t{number}": data}, tmp_path / f"model-{number}.safetensors")
    write_sidecar(
        record_checksums(open_manifest(tmp_path), chunk_bytes=MIB), default_sidecar_path(open_manifest(tmp_path))
    )
    return tmp_path


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_checkpoint_of_several_files_is_loaded(
    checkpoint: Path, allow_threads: Callable[[int], None], number: int
) -> None:
    allow_threads(number)

    loaded = mm.load_state_dict(checkpoint)

    assert len(loaded) == 4
    for path in checkpoint.glob("*.safetensors"):
        for name, expected in load_file(path).items():
            assert np.array_equal(loaded[name].numpy(), expected)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_checkpoint_is_verified(checkpoint: Path, allow_threads: Callable[[int], None], number: int) -> None:
    allow_threads(number)

    assert verify_checksums(open_manifest(checkpoint), threads=4).ok


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_of_an_arena_are_taken(allow_threads: Callable[[int], None], number: int) -> None:
    arena = HostArena(8 * MIB)
    allow_threads(number)

    arena.prefault(4)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_request_is_made_once(allow_threads: Callable[[int], None], number: int) -> None:
    allow_threads(number)
    made: list[int] = []

    run_requests(made.append, range(50), num_in_flight=4)
    run_requests(made.append, range(50, 60), num_in_flight=4)

    assert sorted(made) == list(range(60))


def test_work_that_the_caller_did_is_not_done_again_when_a_thread_comes_free(
    allow_threads: Callable[[int], None],
) -> None:
    allow_threads(1)
    busy, begun = threading.Event(), threading.Event()
    done_by: list[str] = []
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:

        def wait() -> None:
            begun.set()
            assert busy.wait(BOUND_S)

        waiting = submit(pool, wait)
        assert begun.wait(BOUND_S)
        future = submit(pool, lambda: done_by.append(threading.current_thread().name))  # no thread for it
        assert future.done()
        busy.set()
        waiting.result(BOUND_S)
        pool.submit(lambda: None).result(BOUND_S)  # behind what is left in the queue

    assert done_by == [threading.main_thread().name]


def test_an_error_of_work_that_the_caller_did_is_in_its_future(allow_threads: Callable[[int], None]) -> None:
    allow_threads(0)

    def fail() -> None:
        raise OSError("no")

    with ThreadPoolExecutor(2) as pool:
        assert isinstance(submit(pool, fail).exception(BOUND_S), OSError)


def test_after_an_error_the_caller_begins_nothing_more(allow_threads: Callable[[int], None]) -> None:
    allow_threads(0)
    begun: list[int] = []

    def ask(item: int) -> None:
        begun.append(item)
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        run_requests(ask, range(3), num_in_flight=2)

    assert begun == [0]


def test_an_interrupt_of_work_that_the_caller_did_reaches_the_caller(allow_threads: Callable[[int], None]) -> None:
    allow_threads(0)
    begun: list[int] = []

    def ask(item: int) -> None:
        begun.append(item)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_requests(ask, range(3), num_in_flight=2)

    assert begun == [0]


def test_an_interrupt_while_a_thread_is_started_waits_for_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    _pool.cache_clear()
    begun, ended, stopped = threading.Event(), threading.Event(), threading.Event()
    start = threading.Thread.start

    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        assert begun.wait(BOUND_S)
        raise KeyboardInterrupt  # as in the wait for the thread's first sign of life

    def ask(_: int) -> None:
        begun.set()
        assert stopped.wait(BOUND_S)
        ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)

    with pytest.raises(KeyboardInterrupt):
        run_requests(ask, range(3), num_in_flight=3, on_failure=stopped.set)

    assert ended.is_set()
    started[0].join(BOUND_S)
    assert not started[0].is_alive()  # the process would wait for it at its end
    monkeypatch.undo()
    assert run_requests(lambda item: item, range(3), num_in_flight=3) == [0, 1, 2]
