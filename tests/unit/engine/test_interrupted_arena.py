"""Memory of an arena stays with the threads that write to it, however the load that began them ended."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megamind_ray.config import Config, IoConfig
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.errors import CapacityError
from megamind_ray.io import LocalSource, open_manifest, open_source
from megamind_ray.units import KIB, MIB

CONFIG = Config(io=IoConfig(chunk_bytes=64 * KIB, extent_bytes=64 * KIB, read_threads=4, direct="never"))


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    path = tmp_path / "w.safetensors"
    save_file({f"t{number}": torch.full((256 * KIB,), number, dtype=torch.uint8) for number in range(4)}, path)
    return open_manifest(path)


def load(manifest: Any, arena: HostArena, opener: Any = None) -> dict[str, torch.Tensor]:
    return load_tensors(manifest, list(manifest.tensors.values()), "cpu", CONFIG, arena=arena, opener=opener).tensors


class StuckStorage:
    """Reads of other threads than the main one wait for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.stuck = threading.Event()
        self.threads: set[threading.Thread] = set()

    def __call__(self, uri: str, info: Any) -> Any:
        source = open_source(uri, info)
        assert isinstance(source, LocalSource)
        real_read = source.read_into

        def read_into(offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.threads.add(threading.current_thread())
                self.stuck.set()
                assert self.gate.wait(30)
            real_read(offset, buffer, past_cache=past_cache)

        source.read_into = read_into  # type: ignore[method-assign]
        return source


def test_an_impatient_interrupt_leaves_the_memory_to_the_threads_that_still_write(manifest: Any) -> None:
    """Ctrl-C twice ends the wait for threads; the next load must not get what they still write to."""
    arena, storage, over = HostArena(2 * MIB, keep_pages=True), StuckStorage(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_until_it_ends() -> None:
        storage.stuck.wait(30)
        while not over.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)

    impatient = threading.Thread(target=interrupt_until_it_ends)
    impatient.start()
    try:
        try:
            load(manifest, arena, storage)
        finally:
            over.set()
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("it was not interrupted")
    impatient.join()

    with pytest.raises(CapacityError):
        arena.allocate(2 * MIB)
    storage.gate.set()
    for thread in storage.threads:
        thread.join(30)
    assert arena.allocate(2 * MIB).nbytes == 2 * MIB


def test_a_load_goes_on_with_the_threads_that_it_gets(manifest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads of a user may be limited."""
    started = []
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    arena = HostArena(2 * MIB)

    tensors = load(manifest, arena)

    assert [int(tensors[f"t{number}"].unique()) for number in range(4)] == [0, 1, 2, 3]


def test_an_arena_collects_garbage_before_it_refuses(manifest: Any) -> None:
    class Module:
        pass

    arena = HostArena(1 * MIB + 64 * KIB)
    module: Any = Module()
    module.itself, module.weights = module, load(manifest, arena)
    del module

    assert load(manifest, arena)
