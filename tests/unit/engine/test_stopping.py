"""When one thread fails, or the user interrupts, what the others wait for ends too."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import megamind_ray as mm
from megamind_ray.config import Config, IoConfig, RetryConfig
from megamind_ray.engine.team import run_team
from megamind_ray.errors import RequestError
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, verify_checksums, write_sidecar
from megamind_ray.io.stop import Stop
from megamind_ray.testing.fault_server import Answer, Request, parse_range
from megamind_ray.testing.range_server import RangeServer

CHUNK_BYTES = 64 << 10
BOUND_S = 30.0
# Without a word to stop, the silent server would be asked four times.
RETRY = RetryConfig(attempts=4, first_wait_s=0.0, max_wait_s=0.0, request_s=1.0)


def test_an_error_reaches_what_the_others_wait_for_before_they_are_waited_for() -> None:
    waiting, ended = threading.Event(), threading.Event()
    waits: list[bool] = []

    def work(item: int) -> None:
        if item == 0:
            waiting.set()
            waits.append(ended.wait(BOUND_S))
        else:
            waiting.wait(BOUND_S)
            raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        run_team(range(2), work, num_threads=2, name="t", on_failure=ended.set)

    assert waits == [True]


@pytest.mark.parametrize("was_started", [True, False])
def test_an_interrupt_while_a_thread_is_started_ends_the_work(
    monkeypatch: pytest.MonkeyPatch, was_started: bool
) -> None:
    ended: list[BaseException] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if not thread.name.startswith("t-"):
            start(thread)
            return
        if was_started:
            start(thread)
        raise KeyboardInterrupt  # as in the wait for the thread's first sign of life

    monkeypatch.setattr(threading.Thread, "start", interrupted)

    def load() -> None:
        try:
            run_team(range(4), lambda _: None, num_threads=3, name="t")
        except KeyboardInterrupt as error:
            ended.append(error)

    caller = threading.Thread(target=load, daemon=True)
    caller.start()
    caller.join(BOUND_S)

    assert len(ended) == 1


def test_a_thread_that_comes_after_the_end_of_the_work_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[threading.Thread] = []
    done: list[int] = []
    start = threading.Thread.start

    def later(thread: threading.Thread) -> None:
        if thread.name.startswith("t-"):
            late.append(thread)
        else:
            start(thread)

    monkeypatch.setattr(threading.Thread, "start", later)

    def work(item: int) -> None:
        done.append(item)
        raise OSError("no")

    def load() -> None:
        with pytest.raises(OSError, match="no"):
            run_team([0, 1, 2], work, num_threads=2, name="t")

    caller = threading.Thread(target=load, daemon=True)
    caller.start()
    caller.join(BOUND_S)
    assert not caller.is_alive()
    start(late[0])
    late[0].join(BOUND_S)

    assert done == [0]


def test_the_first_error_is_raised_though_others_follow_from_it() -> None:
    waiting, ended = threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            waiting.set()
            ended.wait(BOUND_S)
            raise OSError("was stopped")
        waiting.wait(BOUND_S)
        raise RequestError("the cause")

    with pytest.raises(RequestError, match="the cause"):
        run_team(range(2), work, num_threads=2, name="t", on_failure=ended.set)


def test_an_interrupt_while_the_others_are_waited_for_ends_their_work() -> None:
    other_is_busy, caller_is_done, ended = threading.Event(), threading.Event(), threading.Event()
    waits: list[bool] = []

    def work(_item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            other_is_busy.wait(BOUND_S)
            caller_is_done.set()
            return
        other_is_busy.set()
        caller_is_done.wait(BOUND_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        waits.append(ended.wait(BOUND_S))

    with pytest.raises(KeyboardInterrupt):
        run_team(range(2), work, num_threads=2, name="t", on_failure=ended.set)

    assert waits == [True]


def test_an_own_signal_follows_the_outer_one_and_not_the_other_way_round() -> None:
    outer = threading.Event()
    inner, other = Stop(outer), Stop(outer)

    inner.set()
    assert (inner.is_set(), other.is_set(), outer.is_set()) == (True, False, False)

    outer.set()
    assert other.is_set()
    assert other.wait(BOUND_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of one chunk each, with an index."""
    weights = {}
    for name in ("a", "b"):
        save_file({name: np.zeros(CHUNK_BYTES, np.uint8)}, tmp_path / f"{name}.safetensors")
        weights[name] = f"{name}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return tmp_path


class HalfSilent:
    """Of the requests that ``picks`` names, says nothing to the ``silent`` one, and refuses the others after it."""

    def __init__(self, server: RangeServer, picks: Callable[[Request], bool], silent: str) -> None:
        self.asked: Counter[str] = Counter()
        self._server, self._files, self._picks, self._silent = server, server.answer, picks, silent
        self._silent_is_asked = threading.Event()
        server.answer = self._answer

    def _answer(self, request: Request) -> Answer:
        if request.method != "GET" or not self._picks(request):
            return self._files(request)
        key = f"{request.path} {request.headers['range']}"
        self.asked[key] += 1
        if self._silent in key:
            self._silent_is_asked.set()
            self._server.hold()
        self._silent_is_asked.wait(BOUND_S)
        return Answer(403, {})


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    with RangeServer(folder) as server:
        yield server


def config(**io: Any) -> Config:
    return Config(io=IoConfig(chunk_bytes=CHUNK_BYTES, **io), retry=RETRY)


def test_a_silent_file_is_not_asked_again_once_another_one_was_refused(server: RangeServer) -> None:
    manifest = open_manifest(server.uri)
    begin = manifest.files[0].data_begin
    asked = HalfSilent(server, lambda it: f"bytes={begin}-" in it.headers.get("range", ""), "/a.safetensors").asked

    with pytest.raises(RequestError, match=r"b\.safetensors: no permission"):
        mm.load_state_dict(server.uri, config=config(extent_bytes=CHUNK_BYTES))

    assert sorted(asked.values()) == [1, 1]


def test_a_silent_chunk_is_not_asked_again_once_its_neighbour_was_refused(tmp_path: Path) -> None:
    save_file({"w": np.zeros(2 * CHUNK_BYTES, np.uint8)}, tmp_path / "w.safetensors")
    with RangeServer(tmp_path) as server:
        begin = open_manifest(f"{server.uri}/w.safetensors").files[0].data_begin
        asked = HalfSilent(
            server, lambda it: (parse_range(it.headers.get("range", "")) or (0, 0))[0] >= begin, f"bytes={begin}-"
        ).asked

        with pytest.raises(RequestError, match="no permission"):
            mm.load_state_dict(f"{server.uri}/w.safetensors", config=config(extent_bytes=2 * CHUNK_BYTES))

        assert sorted(asked.values()) == [1, 1]


def test_a_silent_header_is_not_asked_again_once_another_one_was_refused(server: RangeServer) -> None:
    asked = HalfSilent(server, lambda it: it.path.endswith(".safetensors"), "/a.safetensors").asked

    with pytest.raises(RequestError, match=r"b\.safetensors: no permission"):
        open_manifest(server.uri, retry=RETRY)

    assert sorted(asked.values()) == [1, 1]


def test_verify_does_not_ask_a_silent_chunk_again_once_another_one_was_refused(tmp_path: Path) -> None:
    save_file({"w": np.zeros(2 * CHUNK_BYTES, np.uint8)}, tmp_path / "w.safetensors")
    local = open_manifest(tmp_path / "w.safetensors")
    write_sidecar(record_checksums(local, chunk_bytes=CHUNK_BYTES), default_sidecar_path(local))
    with RangeServer(tmp_path) as server:
        manifest = open_manifest(f"{server.uri}/w.safetensors", retry=RETRY)
        begin = manifest.files[0].data_begin
        asked = HalfSilent(
            server, lambda it: (parse_range(it.headers.get("range", "")) or (0, 0))[0] >= begin, f"bytes={begin}-"
        ).asked

        with pytest.raises(RequestError, match="no permission"):
            verify_checksums(manifest, threads=2, retry=RETRY)

        assert sorted(asked.values()) == [1, 1]
