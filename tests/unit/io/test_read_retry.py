import errno
import threading
from typing import Any

import pytest

from megamind_ray.config import RetryConfig
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io import FileVersion, ReadCounters, ReadKind, ShortReadError, read_with_retry

RETRY = RetryConfig(attempts=4, first_wait_s=0.1, max_wait_s=0.3)


class FlakySource:
    """Raises the given errors, one a call, then gives zeros."""

    uri = "s3://bucket/w.safetensors"
    version = FileVersion(1000)
    size_bytes = 1000

    def __init__(self, *errors: Any) -> None:
        self.errors = list(errors)
        self.offsets: list[int] = []

    def read_into(self, offset: int, buffer: Any, *, past_cache: bool = False) -> None:
        self.offsets.append(offset)
        if self.errors:
            raise self.errors.pop(0)
        buffer[:] = bytes(buffer.nbytes)


def read(source: Any, *, counters: Any = None, waits: Any = None, uniform: Any = lambda: 1.0, **options: Any) -> Any:
    buffer = memoryview(bytearray(b"x" * 10))
    waits = [] if waits is None else waits
    counters = counters or ReadCounters()
    read_with_retry(source, 20, buffer, RETRY, counters, sleep=waits.append, uniform=uniform, **options)
    return bytes(buffer)


@pytest.mark.parametrize(
    "error", [OSError("reset"), TimeoutError("slow"), ShortReadError("5 of 10"), ConnectionError()]
)
def test_a_passing_fault_is_tried_again(error: Any) -> None:
    source = FlakySource(error, error)

    assert read(source) == bytes(10)
    assert len(source.offsets) == 3


def test_waits_grow_to_their_bound() -> None:
    waits = []

    read(FlakySource(*[OSError()] * 3), waits=waits)

    assert waits == pytest.approx([0.1, 0.2, 0.3])


def test_waits_are_at_least_half_of_that() -> None:
    waits = []

    read(FlakySource(*[OSError()] * 3), waits=waits, uniform=lambda: 0.0)

    assert waits == pytest.approx([0.05, 0.1, 0.15])


def test_the_first_attempt_is_payload_and_the_others_are_retries() -> None:
    counters = ReadCounters()

    read(FlakySource(OSError(), OSError()), counters=counters)

    assert (counters.payload_bytes, counters.retried_bytes, counters.num_reads) == (10, 20, 3)


def test_a_reread_of_the_callers_counts_as_a_retry_wholly() -> None:
    counters = ReadCounters()

    read(FlakySource(OSError()), counters=counters, kind=ReadKind.RETRIED)

    assert (counters.payload_bytes, counters.retried_bytes) == (0, 20)


def test_a_lasting_fault_is_a_source_error_with_file_range_and_attempts() -> None:
    source = FlakySource(*[OSError(errno.EIO, "Input/output error")] * 9)

    with pytest.raises(SourceError, match=r"reading bytes \[20, 30\) failed 4 times, .*Input/output error") as caught:
        read(source)

    assert (caught.value.file, caught.value.attempts) == ("s3://bucket/w.safetensors", 4)
    assert len(source.offsets) == 4
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_fault_of_the_storage(number: int) -> None:
    source = FlakySource(*[OSError(number, "Too many open files")] * 9)

    with pytest.raises(SourceError, match=r"Too many open files; close files, or raise .*ulimit -n"):
        read(source)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IntegrityError("changed", file="f"), IntegrityError),
        (RequestError("no ranges"), RequestError),
        (PermissionError(), RequestError),
        (FileNotFoundError(), RequestError),
        (IsADirectoryError(), RequestError),
    ],
)
def test_what_another_attempt_cannot_help_is_not_tried_again(error: Any, kind: Any) -> None:
    source = FlakySource(error)

    with pytest.raises(kind):
        read(source)

    assert len(source.offsets) == 1


def test_an_interrupt_is_not_swallowed() -> None:
    source = FlakySource(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        read(source)

    assert len(source.offsets) == 1


def test_once_it_is_stopped_there_is_no_further_attempt_and_the_error_says_how_many_there_were() -> None:
    source, stop = FlakySource(*[OSError("reset")] * 3), threading.Event()

    with pytest.raises(SourceError, match=r"reading bytes \[20, 30\) failed once, last with: reset") as caught:
        read_with_retry(
            source,
            20,
            memoryview(bytearray(10)),
            RETRY,
            ReadCounters(),
            sleep=lambda _seconds: stop.set(),  # as if it were set during the wait
            stopped=stop.is_set,
        )

    assert caught.value.attempts == 1
    assert len(source.offsets) == 1


def test_what_was_stopped_before_is_not_waited_for() -> None:
    waits: list[float] = []

    with pytest.raises(SourceError, match="failed once"):
        read(FlakySource(OSError("reset")), waits=waits, stopped=lambda: True)

    assert waits == []
