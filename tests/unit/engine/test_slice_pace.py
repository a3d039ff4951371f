"""How many threads read slices, and how much at a time: as storage wants it, or as the cores of the machine do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megamind_ray.config import Config
from megamind_ray.core.manifest import FileInfo
from megamind_ray.engine import slice_reads
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.errors import RequestError
from megamind_ray.io.checkpoint import open_manifest
from megamind_ray.io.local_source import LocalSource

CORES, THREADS = 2, 8


class _Storage:
    """Local files that say of themselves whether they are in memory.

    Attributes:
        lengths: Of each read.
        most_at_once: Reads that were under way at a time.
    """

    def __init__(self, *, in_memory: bool) -> None:
        self.in_memory = in_memory
        self.lengths: list[int] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    def __call__(self, uri: str, _expected: FileInfo) -> LocalSource:
        return _Source(uri, self)

    def reading(self, num_bytes: int) -> None:
        with self._lock:
            self.lengths.append(num_bytes)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        # Long enough for all threads there are to come here.
        threading.Event().wait(0.05)
        with self._lock:
            self._at_once -= 1


class _Source(LocalSource):
    def __init__(self, uri: str, storage: _Storage) -> None:
        super().__init__(uri)
        self._storage = storage

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        self._storage.reading(buffer.nbytes)
        super().read_into(offset, buffer, past_cache=past_cache)

    def is_in_memory(self, offset: int, num_bytes: int) -> bool:
        assert 0 <= offset <= offset + num_bytes <= self.size_bytes
        return self._storage.in_memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MB, many times what a thread reads at a time."""
    path = tmp_path_factory.mktemp("pace")
    save_file(
        {f"weight.{index}": torch.full((512, 1024), index, dtype=torch.bfloat16) for index in range(4)},
        path / "model.safetensors",
    )
    return path


def _load(folder: Path, config: Config, storage: Any) -> None:
    manifest = open_manifest(folder)
    config = replace(config, io=replace(config.io, read_threads=THREADS))
    loaded = load_tensors(manifest, list(manifest.tensors.values()), "cpu", config, opener=storage).tensors
    assert len(loaded) == 4
    assert all(bool((loaded[f"weight.{index}"] == index).all()) for index in range(4))


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_reads, "usable_cores", lambda: CORES)


@pytest.mark.usefixtures("two_cores")
def test_what_is_in_memory_is_read_by_a_thread_for_each_core_in_longer_pieces(folder: Path, config: Config) -> None:
    storage, cold = _Storage(in_memory=True), _Storage(in_memory=False)
    _load(folder, config, storage)
    _load(folder, config, cold)
    assert storage.most_at_once == CORES
    assert cold.most_at_once > CORES
    assert max(storage.lengths) > max(cold.lengths)
    assert sum(storage.lengths) == sum(cold.lengths)


@pytest.mark.usefixtures("two_cores")
def test_no_more_bytes_are_in_flight_than_for_storage(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = _Storage(in_memory=True)
    monkeypatch.setattr(slice_reads, "_LONGEST_IN_MEMORY_BYTES", 1 << 40)
    _load(folder, config, storage)
    assert max(storage.lengths) * CORES <= config.io.extent_bytes * THREADS


def test_a_machine_of_more_cores_than_threads_is_not_asked_what_it_has_in_memory(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_reads, "usable_cores", lambda: THREADS)
    monkeypatch.setattr(_Source, "is_in_memory", lambda *_: pytest.fail("asked"))
    _load(folder, config, _Storage(in_memory=True))


@pytest.mark.usefixtures("two_cores")
def test_a_file_that_is_gone_is_told_by_its_reads(folder: Path, config: Config) -> None:
    def gone(uri: str, _expected: FileInfo) -> LocalSource:
        return LocalSource(uri + ".gone")

    with pytest.raises(RequestError, match="no such file"):
        _load(folder, config, gone)
