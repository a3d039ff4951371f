from __future__ import annotations

import pickle

import pytest

from megamind_ray.errors import (
    CapacityError,
    ClusterError,
    IntegrityError,
    MegamindError,
    RequestError,
    SourceError,
    listed,
)

ERRORS = [
    RequestError("wrong"),
    CapacityError("too large", where="GPU n0:3", needed_bytes=5, free_bytes=2),
    IntegrityError("damaged", file="/w.safetensors", tensor="a", begin=8, end=16),
    SourceError("gone", file="s3://bucket/w.safetensors", attempts=4),
    ClusterError("lost"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_attributes(error: MegamindError) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize(("needed", "missing"), [(5, 3), (1, 0)])
def test_how_much_is_missing(needed: int, missing: int) -> None:
    assert CapacityError("too large", where="pool", needed_bytes=needed, free_bytes=2).missing_bytes == missing


def test_a_source_error_says_on_which_node_it_happened() -> None:
    error = SourceError("gone", file="/w.safetensors", attempts=4)

    there = error.on("n1")

    assert (str(there), there.file, there.attempts) == ("gone (on node n1)", "/w.safetensors", 4)
    assert there.__cause__ is error


@pytest.mark.parametrize(("limit", "text"), [(3, "a, b, c"), (2, "a, b and 1 more")])
def test_long_lists_are_cut_in_messages(limit: int, text: str) -> None:
    assert listed(["a", "b", "c"], limit) == text
