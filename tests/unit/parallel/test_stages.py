from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.errors import RequestError
from megamind_ray.planning.naming import split_numbers
from megamind_ray.planning.stages import layer_of, partition


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.experts.3.w1.weight", ("model.layers.", 12)),
        ("h.3.ln_1.weight", ("h.", 3)),
        ("transformer.h.3.attn.c_attn.weight", ("transformer.h.", 3)),
        ("bert.encoder.layer.7.output.dense.bias", ("bert.encoder.layer.", 7)),
        ("gpt_neox.layers.1.attention.dense.weight", ("gpt_neox.layers.", 1)),
        ("decoder.block.5.layer.2.mlp.experts.expert_1.wi.weight", ("decoder.block.", 5)),
        ("0.auto_model.encoder.layer.4.x", ("0.auto_model.encoder.layer.", 4)),
        ("model.norm.weight", None),
        ("switch.layersize.3.weight", None),
    ],
)
def test_layer_is_found_in_the_name(name: str, layer: tuple[str, int] | None) -> None:
    assert layer_of(*split_numbers(name)) == layer


def test_embedding_and_head_count_with_first_and_last() -> None:
    assert partition([10] * 6, first_bytes=20, last_bytes=0, num_stages=2) == (0, 0, 1, 1, 1, 1)
    assert partition([10] * 6, first_bytes=0, last_bytes=20, num_stages=2) == (0, 0, 0, 0, 1, 1)


def test_ties_fill_earlier_stages_first_and_leave_none_empty() -> None:
    assert partition([1] * 5, 0, 0, 3) == (0, 0, 1, 1, 2)
    assert partition([1] * 5, 0, 0, 4) == (0, 0, 1, 2, 3)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(RequestError, match="pp=4 needs at least 4 layers, but the checkpoint has 3"):
        partition([1, 1, 1], 0, 0, 4)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 30), st.integers(0, 30))
def test_largest_stage_is_as_small_as_any_split_allows(sizes: list[int], pp: int, first: int, last: int) -> None:
    pp = min(pp, len(sizes))
    stage_of = partition(sizes, first, last, pp)
    full = list(sizes)
    full[0] += first
    full[-1] += last

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(full[a:b]) for a, b in itertools.pairwise((0, *cuts, len(full))))

    cuts = tuple(stage_of.index(stage) for stage in range(1, pp))
    assert sorted(stage_of) == list(stage_of)
    assert set(stage_of) == set(range(pp))
    assert largest(cuts) == min(largest(other) for other in itertools.combinations(range(1, len(full)), pp - 1))
