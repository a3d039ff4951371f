"""Storage that goes wrong on purpose, between the file and the buffer that it is read into."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from megamind_ray.core.manifest import FileInfo
from megamind_ray.io.checksum import crc32
from megamind_ray.io.opening import open_source
from megamind_ray.io.source import FileVersion, Source

__all__ = ["Damage", "InjectingStorage", "Read"]


@dataclass(frozen=True, slots=True)
class Read:
    """A read that storage has just answered.

    Attributes:
        uri: Path or URI of the file.
        offset: First byte in the file.
        buffer: What came; damage is done to it.
        number: How many reads have brought bytes of this range, this one included.
        past_cache: Whether the reader asked past the cache.
    """

    uri: str
    offset: int
    buffer: memoryview
    number: int
    past_cache: bool

    @property
    def end(self) -> int:
        return self.offset + self.buffer.nbytes


Damage = Callable[[Read], None]
"""Changes the buffer of a read, or raises what storage would; may be called from several threads."""


@dataclass(eq=False)
class InjectingStorage:
    """An opener, for the ``opener`` of loads.

    Attributes:
        damage: Called after each read.
        on_open: Called with the URI of each file before it is opened; may raise.
        long_reads: Prefer one read of several chunks, as storage does whose files are not in the page cache.
        reads: (URI, offset) of all reads so far, in order.
    """

    damage: Damage = lambda _read: None
    on_open: Callable[[str], None] = lambda _uri: None
    long_reads: bool = False
    reads: list[tuple[str, int]] = field(default_factory=list)
    _ranges: list[tuple[str, int, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, uri: str, expected: FileInfo) -> Source:
        self.on_open(uri)
        return _InjectingSource(open_source(uri, expected), self)

    def answered(self, uri: str, offset: int, buffer: memoryview, *, past_cache: bool) -> None:
        """Counts a read and does the damage."""
        end = offset + buffer.nbytes
        with self._lock:
            self.reads.append((uri, offset))
            self._ranges.append((uri, offset, end))
            number = sum(of == uri and first < end and offset < last for of, first, last in self._ranges)
        self.damage(Read(uri, offset, buffer, number, past_cache))


class _InjectingSource:
    def __init__(self, inner: Source, storage: InjectingStorage) -> None:
        self._inner = inner
        self._storage = storage

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def version(self) -> FileVersion:
        return self._inner.version

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        view = buffer.cast("B")
        self._inner.read_into(offset, view, past_cache=past_cache)
        self._storage.answered(self.uri, offset, view, past_cache=past_cache)

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:
        self.read_into(offset, buffer, past_cache=past_cache)  # summed after the damage: it is done on the way
        return crc32(buffer)

    def prefers_long_reads(self, offset: int, num_bytes: int) -> bool:
        return self._storage.long_reads or self._inner.prefers_long_reads(offset, num_bytes)

    def is_in_memory(self, offset: int, num_bytes: int) -> bool:
        return self._inner.is_in_memory(offset, num_bytes)

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
