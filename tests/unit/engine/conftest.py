"""Checkpoints, hardware and storage that fails on purpose, for the tests of the engine."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import save_file

from megamind_ray.config import Config, IoConfig, RetryConfig, RoutingConfig
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.io import (
    LocalSource,
    Source,
    crc32,
    default_sidecar_path,
    open_manifest,
    open_source,
    record_checksums,
    write_sidecar,
)
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.demands import build_demands

CHUNK_BYTES = 64 << 10


@pytest.fixture
def config() -> Config:
    """Small chunks, so that small checkpoints have many; no waits between attempts."""
    return Config(
        io=IoConfig(
            chunk_bytes=CHUNK_BYTES, extent_bytes=4 * CHUNK_BYTES, pool_extent_bytes=4 * CHUNK_BYTES, read_threads=2
        ),
        retry=RetryConfig(attempts=3, first_wait_s=0.0, max_wait_s=0.0),
        routing=RoutingConfig(min_direct_bytes=0),
    )


@pytest.fixture
def pool_config(config: Config) -> Config:
    """As ``config``, with every byte through the pool."""
    return Config(io=config.io, retry=config.retry, routing=RoutingConfig(force_pool=True))


@pytest.fixture
def write_raw() -> Callable[..., Path]:
    """Writes a safetensors file of given bytes, also of dtypes that the safetensors library cannot write."""

    def write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 8) -> Path:
        header: dict[str, object] = {}
        data = b""
        for name, (dtype, shape, content) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % pad)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return path

    return write


@dataclass(frozen=True)
class LlamaFolder:
    """A generated checkpoint and what is in it."""

    path: Path
    tensors: dict[str, torch.Tensor]

    @property
    def file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaFolder:
    """About 1.1 MB in the shape of a llama: grouped-query attention, an odd vocabulary, bf16."""
    path = tmp_path_factory.mktemp("llama")
    hidden, inner, vocab, layers = 128, 172, 501, 3
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "model.norm.weight": weight(hidden),
        "lm_head.weight": weight(vocab, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(hidden, hidden)
        for name in ("k_proj", "v_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(hidden // 2, hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = weight(inner, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = weight(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = weight(hidden)
    save_file(tensors, path / "model.safetensors")
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(settings))
    return LlamaFolder(path, tensors)


@pytest.fixture
def record() -> Callable[[Path], Manifest]:
    """Writes a sidecar of checksums beside a checkpoint; gives the manifest that knows it."""

    def write(path: Path) -> Manifest:
        manifest = open_manifest(path)
        write_sidecar(record_checksums(manifest, chunk_bytes=CHUNK_BYTES), default_sidecar_path(manifest))
        return open_manifest(path)

    return write


@pytest.fixture(scope="session")
def topology() -> Topology:
    """Two nodes with four GPUs each."""
    gpus = tuple(Gpu(index=index, memory_bytes=1 << 30, free_bytes=1 << 30) for index in range(4))
    return Topology(
        nodes=tuple(Node(id=f"n{index}", gpus=gpus, memory_bytes=8 << 30, pool_bytes=1 << 30) for index in range(2))
    )


@pytest.fixture
def plan_for(topology: Topology) -> Callable[..., tuple[Plan, Manifest]]:
    """Plans a folder on ``topology``."""

    def plan(path: Path, parallel: Parallel, config: Config) -> tuple[Plan, Manifest]:
        manifest = open_manifest(path)
        return build_plan(manifest, build_demands(manifest, parallel), topology, config=config), manifest

    return plan


@dataclass
class FaultyStorage:
    """Opens local files whose reads go wrong as told.

    Attributes:
        flip_at: Offset of a byte whose lowest bit comes out flipped.
        flips_left: How often; -1 for always.
        errors_left: Reads that raise an ``OSError`` first.
        before_read: Called with the offset before each read.
        long_reads: Prefer one read of several chunks.
        stale_checks: Checks for changes that see nothing first, as where a network file system caches attributes.
        num_checks: Checks for changes so far.
        offsets: Offsets that were read, in order.
    """

    flip_at: int = -1
    flips_left: int = 0
    errors_left: int = 0
    before_read: Callable[[int], None] = lambda _offset: None
    long_reads: bool = False
    stale_checks: int = 0
    num_checks: int = 0
    offsets: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, uri: str, expected: FileInfo) -> Source:
        inner = open_source(uri, expected)
        assert isinstance(inner, LocalSource)
        return _FaultySource(inner, self)


class _FaultySource:
    def __init__(self, inner: LocalSource, storage: FaultyStorage) -> None:
        self._inner = inner
        self._storage = storage
        self.uri, self.version, self.size_bytes = inner.uri, inner.version, inner.size_bytes

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:
        self.read_into(offset, buffer, past_cache=past_cache)
        return crc32(buffer)

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        storage = self._storage
        storage.before_read(offset)
        self._inner.read_into(offset, buffer, past_cache=past_cache)
        with storage.lock:
            storage.offsets.append(offset)
            if storage.errors_left:
                storage.errors_left -= 1
                raise OSError("the cable was unplugged")
            if offset <= storage.flip_at < offset + buffer.nbytes and storage.flips_left:
                storage.flips_left -= 1
                buffer.cast("B")[storage.flip_at - offset] ^= 1

    def prefers_long_reads(self, _offset: int, _num_bytes: int) -> bool:
        return self._storage.long_reads

    def is_in_memory(self, _offset: int, _num_bytes: int) -> bool:
        return False

    def check_unchanged(self) -> None:
        storage = self._storage
        with storage.lock:
            storage.num_checks += 1
            is_stale = storage.num_checks <= storage.stale_checks
        if not is_stale:
            self._inner.check_unchanged()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage()
