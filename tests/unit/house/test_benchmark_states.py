"""What the load benchmark says of tensors that it does not take."""

from __future__ import annotations

from pathlib import Path

from benchmarks._checkpoint import write_llama
from benchmarks._contenders import OURS
from benchmarks._peers import PEERS
from benchmarks._rounds import in_words
from benchmarks.load import Options, run

MAPPED = next(peer for peer in PEERS if peer.name == "safetensors (mapped)")


def test_each_reason_has_its_tensors() -> None:
    wrong = ["a: is missing", "b: has other bytes than the file", "c: is missing"]

    assert in_words(wrong, 9) == (
        "2 of 9 tensors: each is missing (the first: a); "
        "1 of 9 tensors: each has other bytes than the file (the first: b)"
    )


def test_a_loader_of_mappings_is_not_said_to_be_wrong(tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "llama", total_bytes=1_000_000)
    options = Options(
        folder=tmp_path,
        total_bytes=checkpoint.nbytes,
        num_rounds=1,
        parts=("warm",),
        ours=OURS[:1],
        peers=(MAPPED,),
        quick=True,
    )

    state = run(checkpoint, options).outcomes["warm"].states[MAPPED.name]

    all_of_them = f"{len(checkpoint.places)} of {len(checkpoint.places)} tensors"
    assert state.startswith(f"{all_of_them}: each is a mapping of the file, not memory of its own")
    assert "wrong" not in state


def test_a_hundred_reasons_are_not_told() -> None:
    wrong = [f"w{number}: has the shape {number}" for number in range(100)]

    assert in_words(wrong, 100).endswith("each has the shape 2 (the first: w2); 97 more reasons")
