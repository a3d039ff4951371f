"""The places that hold a program's files: the checkpoint's own folder, then its mirrors (docs/design/0012)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from megamind_ray.config import Config
from megamind_ray.core.location import parse_location
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.program import FileTable
from megamind_ray.core.report import Fault
from megamind_ray.engine.quarantine import Quarantine
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io.digests import FileDigest, file_digest, planned_digest
from megamind_ray.io.opening import open_source
from megamind_ray.io.retry import call_with_retry
from megamind_ray.io.source import Source
from megamind_ray.io.stop import StopSignal

__all__ = ["OWN", "FileSources", "SourceOpener"]

SourceOpener = Callable[[str, FileInfo], Source]
OWN = 0
"""The base that the plan was made from; all others are mirrors."""


class FileSources:
    """Opens each file at each base when it is first needed, and knows which base to ask first. Thread-safe.

    Args:
        files: What to read from.
        config: Mirrors, bounds of retries, when a base is put in quarantine.
        note: Takes what went wrong and was dealt with.
        stop: Set from outside, what fails is not tried again.
        opener: Opens a file; the default is ``io.open_source``.
    """

    def __init__(
        self,
        files: FileTable,
        config: Config,
        *,
        note: Callable[[Fault], None],
        stop: StopSignal,
        opener: SourceOpener | None = None,
    ) -> None:
        self.bases = tuple(dict.fromkeys((files.root, *config.io.mirrors)))
        self._files = files
        self._retry = config.retry
        self._note = note
        self._stop = stop
        self._opener = opener if opener is not None else partial(open_source, io=config.io, retry=config.retry)
        self._quarantine = Quarantine(share=config.retry.quarantine_share, min_reads=config.retry.quarantine_reads)
        self._lock = threading.Lock()
        self._sources: dict[tuple[int, int], Source] = {}
        self._opening: dict[tuple[int, int], Future[Source]] = {}
        self._given_up: dict[tuple[int, int], MegamindError] = {}
        self._unproven: set[tuple[int, int]] = set()
        self._digests: dict[tuple[int, int], FileDigest | None] = {}

    def uri(self, base: int, file: int) -> str:
        """The file at a base."""
        return f"{self.bases[base]}/{self._files.files[file].path}"

    def order(self, file: int) -> list[int]:
        """Bases to ask for a file, best first; the ones in quarantine come last, the ones given up not at all."""
        with self._lock:
            usable = [base for base in range(len(self.bases)) if (base, file) not in self._given_up]
        return sorted(usable, key=lambda base: self._quarantine.holds(self.bases[base]))

    def given_up(self, file: int) -> dict[int, MegamindError]:
        """Bases that are not asked for a file any more, and why."""
        with self._lock:
            return {base: error for (base, other), error in self._given_up.items() if other == file}

    def open(self, base: int, file: int) -> Source:
        """The file at a base, open.

        Raises:
            RequestError: It is not there, or may not be read.
            IntegrityError: It is not the file that was planned: changed, or a mirror's has another size.
            SourceError: The storage does not answer.
        """
        source = self._sources.get((base, file))
        if source is not None:
            return source
        with self._lock:
            source = self._sources.get((base, file))
            if source is not None:  # since the look before
                return source
            opening = self._opening.get((base, file))
            is_first = opening is None
            if opening is None:
                opening = self._opening[base, file] = Future()
        # Outside the lock: remote storage takes its time, and other threads have other files. One thread asks for all
        # that wait for the same file: remote storage would be asked once for each request in flight.
        if not is_first:
            return opening.result()
        try:
            opening.set_result(self._open(base, file))
        except BaseException as error:
            opening.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._opening[base, file]
        return opening.result()

    def _open(self, base: int, file: int) -> Source:
        opened = call_with_retry(
            lambda _attempt: self._opener(self.uri(base, file), self._expected(base, file)),
            uri=self.uri(base, file),
            what="opening it",
            retry=self._retry,
            sleep=self._stop.wait,
            stopped=self._stop.is_set,
        )
        with self._lock:
            self._sources[base, file] = opened
        if base == OWN and len(self.bases) > 1 and not self._has_reference(file):
            self._digest(OWN, file)  # while it can still say
        return opened

    def require_same_bytes(self, base: int, file: int) -> None:
        """Makes sure that a mirror holds what the checkpoint's own folder does, where no checksum will tell.

        Size and header are no proof: a fine-tuned model has the ones of the model that it came from.

        Raises:
            RequestError: It cannot be shown.
            SourceError: The mirror does not answer.
        """
        own, mirrored = self._digest(OWN, file), self._digest(base, file)
        if own is None or mirrored is None or not own.same_bytes(mirrored):
            what = "differ" if own and mirrored and own.algorithm == mirrored.algorithm else "are not known for both"
            raise RequestError(
                f"{self.uri(base, file)}: nothing shows that this mirror holds the bytes of {self.uri(OWN, file)}: no "
                f"checksums were recorded, and the storages' own checksums {what}; record checksums from a copy that "
                "you trust (megamind verify --record), then mirrors can be used"
            )

    def count(self, base: int, *, failed: bool) -> None:
        """Counts a read of a base, and notes when that puts it in quarantine."""
        tally = self._quarantine.count(self.bases[base], failed=failed)
        if tally is not None and len(self.bases) > 1:
            self._note(
                Fault(
                    kind="source_quarantined",
                    where=self.bases[base],
                    action=f"{tally.num_failed:.0f} of {tally.num_reads:.0f} reads failed; not asked again while "
                    "another source is left",
                )
            )

    def took_unproven(self, base: int, file: int) -> None:
        """Remembers that bytes of a file were taken from a base that no checksum was there for."""
        if (base, file) not in self._unproven:
            with self._lock:
                self._unproven.add((base, file))

    def give_up(self, base: int, file: int, error: MegamindError) -> None:
        """Asks a base for a file no more; nothing happens where it is the last one for it, which may come back."""
        with self._lock:
            left = [other for other in range(len(self.bases)) if (other, file) not in self._given_up]
            if base not in left or len(left) == 1:
                return
            self._given_up[base, file] = error
        kind = "source_failed" if base == OWN else "mirror_skipped"
        self._note(Fault(kind=kind, where=self.uri(base, file), action=f"not asked again: {error.message}"))

    def check_unchanged(self, file: int | None = None) -> None:
        """Compares the files that were read, or one of them, with when they were opened.

        With mirrors, only those that gave bytes without a checksum: what was checked is right whatever became of the
        file, and the next bytes come from elsewhere.

        Raises:
            IntegrityError: One of them changed.
        """
        with self._lock:
            sources = [
                source
                for key, source in self._sources.items()
                if file in (None, key[1]) and (len(self.bases) == 1 or key in self._unproven)
            ]
        for source in sources:
            self.require_unchanged(source)

    def require_unchanged(self, source: Source) -> None:
        """Compares one file with when it was opened.

        Raises:
            IntegrityError: It changed.
        """
        call_with_retry(
            lambda _attempt: source.check_unchanged(),
            uri=source.uri,
            what="checking that it did not change",
            retry=self._retry,
            sleep=self._stop.wait,
            stopped=self._stop.is_set,
        )

    def close(self) -> None:
        """Closes all files; nobody reads any more."""
        with self._lock:
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.close()

    def _expected(self, base: int, file: int) -> FileInfo:
        info = self._files.files[file]
        # A copy has its own time and its own tag.
        return info if base == OWN else replace(info, mtime_ns=None, etag=None)

    def _has_reference(self, file: int) -> bool:
        return file in self._files.reference_crc32

    def _digest(self, base: int, file: int) -> FileDigest | None:
        """The checksum that a storage has of a file, where it tells one; asked once."""
        with self._lock:
            if (base, file) in self._digests:
                return self._digests[base, file]
            is_open = (base, file) in self._sources
        location = parse_location(self.uri(base, file))
        try:
            if base == OWN and not is_open:  # it may not be the planned file any more: believe the manifest alone
                found = None if location.is_local else planned_digest(location, self._files.files[file].etag)
            else:
                found = file_digest(location, retry=self._retry, sleep=self._stop.wait, stopped=self._stop.is_set)
        except (RequestError, SourceError, IntegrityError):
            if base != OWN:
                raise
            found = None  # a question that a load can do without
        with self._lock:
            return self._digests.setdefault((base, file), found)
