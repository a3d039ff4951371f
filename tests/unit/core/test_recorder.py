"""What a recorder keeps, and what it keeps when there is more than it has room for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.recorder import MAX_SPANS, NO_RECORD, Recorded, Recorder, RecordSettings, SpanRow
from megamind_ray.core.report import Fault
from megamind_ray.core.tracks import NodeRecorder, NodeTracks, RankRecorder, short_node

ROOM = 16


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def everything(recorder: Recorder, limit: int = 1000) -> Recorded:
    page = recorder.page(limit=limit)
    assert page.next is None
    return page


def bytes_by_kind(rows: tuple[SpanRow, ...]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for row in rows:
        total[row[0], row[1]] += row[4]
    return total


def test_a_span_ends_when_it_is_recorded(clock: Clock) -> None:
    recorder = Recorder(clock)
    clock.at_s = 2.5

    recorder.span("n0/storage", "read", 1.0, nbytes=8, label="a.safetensors")

    assert everything(recorder).spans == (("n0/storage", "read", 1.0, 2.5, 8, "a.safetensors"),)


def test_samples_and_marks_have_the_time_of_their_call(clock: Clock) -> None:
    recorder = Recorder(clock)
    clock.at_s = 3.0

    recorder.sample("bytes n0/host", 7)
    recorder.mark("rank_done", "rank 1")

    page = everything(recorder)
    assert page.samples == (("bytes n0/host", 3.0, 7),)
    assert page.marks == ((3.0, "rank_done", "rank 1"),)


def test_what_is_off_keeps_nothing() -> None:
    NO_RECORD.span("n0/storage", "read", NO_RECORD.now())
    NO_RECORD.sample("bytes n0/host", 1)
    NO_RECORD.mark("rank_done", "rank 0")

    assert NO_RECORD.page() == Recorded()


def test_without_room_neighbours_are_joined_and_no_byte_is_lost(clock: Clock) -> None:
    recorder = Recorder(clock, max_spans=ROOM)
    for number in range(1000):
        clock.at_s = number + 0.5
        recorder.span("rank 0", "copy", float(number), nbytes=3, label=f"block {number}")

    page = everything(recorder)

    assert len(page.spans) <= ROOM
    assert sum(row[4] for row in page.spans) == 3000
    assert len(page.spans) + page.dropped_spans == 1000
    assert (page.spans[0][2], max(row[3] for row in page.spans)) == (0.0, 999.5)


def test_what_was_recorded_early_is_no_coarser_than_what_came_late(clock: Clock) -> None:
    """Joining each pair whenever room is short would leave the first half of a load in two spans."""
    recorder = Recorder(clock, max_spans=64)
    for number in range(10_000):
        clock.at_s = number + 0.5
        recorder.span("rank 0", "copy", float(number), nbytes=1)

    spans = sorted(everything(recorder).spans, key=lambda row: row[2])
    lengths = [row[3] - row[2] for row in spans if row[3] < 4000]

    assert max(lengths) <= 10_000 / 64 * 4
    assert len(lengths) > 64 / 8


def test_spans_of_different_tracks_and_kinds_are_never_joined(clock: Clock) -> None:
    recorder = Recorder(clock, max_spans=ROOM)
    for number in range(200):
        clock.at_s = float(number + 1)
        recorder.span(f"rank {number % 2}", "wait" if number % 3 else "copy", float(number), nbytes=number)

    total = bytes_by_kind(everything(recorder).spans)

    assert total["rank 0", "copy"] == sum(number for number in range(0, 200, 6))
    assert sum(total.values()) == sum(range(200))
    assert len(total) == 4


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["n0/pool", "rank 0"]),
        st.sampled_from(["cut", "put"]),
        st.floats(0, 100),
        st.floats(0, 10),
        st.integers(0, 1 << 40),
    ),
    max_size=200,
)


@given(ROWS)
def test_bytes_and_bounds_of_every_track_and_kind_outlive_any_thinning(
    rows: list[tuple[str, str, float, float, int]],
) -> None:
    recorder = Recorder(lambda: 0.0, max_spans=ROOM)
    for track, kind, begin_s, lasts_s, nbytes in rows:
        recorder.span(track, kind, begin_s, end_s=begin_s + lasts_s, nbytes=nbytes)  # type: ignore[arg-type]

    page = everything(recorder)

    assert len(page.spans) < ROOM
    assert len(page.spans) + page.dropped_spans == len(rows)
    given_rows = tuple((track, kind, begin, begin + lasts, nbytes, "") for track, kind, begin, lasts, nbytes in rows)
    assert bytes_by_kind(page.spans) == bytes_by_kind(given_rows)  # type: ignore[arg-type]
    for key in bytes_by_kind(page.spans):
        kept, were = ([row for row in some if (row[0], row[1]) == key] for some in (page.spans, given_rows))
        assert min(row[2] for row in kept) == min(row[2] for row in were)
        assert max(row[3] for row in kept) == max(row[3] for row in were)


def test_more_tracks_than_room_are_dropped_and_counted() -> None:
    recorder = Recorder(lambda: 1.0, max_spans=ROOM)
    for number in range(100):
        recorder.span(f"rank {number}", "copy", 0.0, nbytes=1)

    page = everything(recorder)

    assert len(page.spans) < ROOM
    assert len(page.spans) + page.dropped_spans == 100


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=300))
def test_the_peak_and_the_last_value_of_a_series_are_kept(values: list[int]) -> None:
    clock = Clock()
    recorder = Recorder(clock, max_spans=ROOM)
    for number, value in enumerate(values):
        clock.at_s = float(number)
        recorder.sample("bytes n0/host", value)

    samples = everything(recorder).samples

    assert len(samples) < ROOM
    assert max(row[2] for row in samples) == max(values)
    assert samples[-1] == ("bytes n0/host", len(values) - 1.0, values[-1])


def test_marks_are_bounded() -> None:
    recorder = Recorder(lambda: 0.0)
    for number in range(5000):
        recorder.mark("chunk_retried", str(number))

    assert len(everything(recorder, limit=5000).marks) == 1000


def test_pages_bring_each_row_once_and_the_first_one_ends_the_recording(clock: Clock) -> None:
    recorder = Recorder(clock)
    for number in range(25):
        recorder.span("rank 0", "copy", 0.0, nbytes=number)
    recorder.sample("bytes n0/host", 1)

    pages = [recorder.page(0, limit=10)]
    recorder.span("rank 0", "copy", 0.0, nbytes=99)
    while pages[-1].next is not None:
        pages.append(recorder.page(pages[-1].next, limit=10))

    assert [row[4] for page in pages for row in page.spans] == list(range(25))
    assert [len(page.samples) for page in pages] == [1, 0, 0]


def test_threads_do_not_lose_each_others_spans() -> None:
    recorder = Recorder(lambda: 1.0, max_spans=1000)

    def work(rank: int) -> None:
        for _ in range(2000):
            recorder.span(f"rank {rank}", "copy", 0.0, nbytes=1)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(bytes_by_kind(everything(recorder).spans).values()) == {2000}


def test_processes_count_from_the_start_of_the_load_in_steps_of_their_own_clock() -> None:
    wall, steps = Clock(), Clock()
    wall.at_s, steps.at_s = 1010.0, 5.0
    recorder = RecordSettings(started_at_s=1000.0).recorder(wall=wall, steps=steps)

    assert recorder.now() == 10.0
    wall.at_s = 4.0  # somebody sets the clock of the machine
    steps.at_s = 5.5
    assert recorder.now() == 10.5


def test_many_processes_have_less_room_each() -> None:
    settings = RecordSettings(started_at_s=0.0)

    assert settings.shared_by(3).max_spans == MAX_SPANS
    assert settings.shared_by(100).max_spans == 2000
    assert settings.shared_by(10**9).max_spans > 1


def test_of_a_node_id_of_rays_the_first_digits_are_its_name() -> None:
    assert NodeTracks.of("ab" * 28).storage == "abababab/storage"
    assert [short_node(node) for node in ("n0", "10.0.0.1")] == ["n0", "10.0.0.1"]


def test_a_read_is_a_span_of_storage_and_with_a_reference_a_check_of_the_pool(clock: Clock) -> None:
    recorder = Recorder(clock)
    node = NodeRecorder(recorder, "n0")
    clock.at_s = 2.0

    node.read(1.0, 8, file="a.safetensors", verified="transit")
    node.read(1.5, 4, file="https://user:secret@host/b.safetensors", verified="reference")

    read, again, check = everything(recorder).spans
    assert read == ("n0/storage", "read", 1.0, 2.0, 8, "a.safetensors")
    assert again[:5] == ("n0/storage", "read", 1.5, 2.0, 4)
    assert check == ("n0/pool", "verify", 2.0, 2.0, 4, again[5])
    assert "secret" not in again[5]


def test_a_direct_read_is_read_and_copied_by_its_rank(clock: Clock) -> None:
    recorder = Recorder(clock)
    clock.at_s = 2.0

    RankRecorder(recorder, 3).read(1.0, 10, placed_bytes=8, file="a.safetensors")

    assert everything(recorder).spans == (
        ("rank 3", "read", 1.0, 2.0, 10, "a.safetensors"),
        ("rank 3", "copy", 2.0, 2.0, 8, "a.safetensors"),
    )


def test_a_fault_is_a_mark(clock: Clock) -> None:
    recorder = Recorder(clock)
    fault = Fault(kind="chunk_retried", where="a.safetensors [0, 8)", action="read in attempt 2")

    NodeRecorder(recorder, "n0").fault(fault)

    assert everything(recorder).marks == ((0.0, "chunk_retried", "a.safetensors [0, 8); read in attempt 2"),)
