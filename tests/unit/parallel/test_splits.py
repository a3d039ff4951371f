from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Placement, Replicate, Shard
from megamind_ray.errors import RequestError
from megamind_ray.planning.splits import chunk_bounds, feature_bounds, layouts

QUERY = Heads(count=12, setting="num_attention_heads")
KEYS = Heads(count=4, setting="num_key_value_heads", kv=True)


def local_shapes(shape: tuple[int, ...], placement: Placement, tp: int, ep: int = 1) -> list[tuple[int, ...]]:
    return [layout.shape for layout in layouts(shape, placement, tp, ep=ep, what="w")]


@given(size=st.integers(0, 200), parts=st.integers(1, 17))
def test_uneven_splits_are_those_of_torch_chunk(size: int, parts: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    chunks = [length for length in chunks if length] + [0] * (parts - len([length for length in chunks if length]))
    assert [end - begin for begin, end in chunk_bounds(size, parts)] == chunks


@given(size=st.integers(1, 300), parts=st.integers(1, 9), unit=st.integers(1, 40))
def test_units_are_never_cut(size: int, parts: int, unit: int) -> None:
    bounds = chunk_bounds(size, parts, unit)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    for (_, end), (begin, _) in itertools.pairwise(bounds):
        assert end == begin
        assert end % unit == 0 or end == size


def test_last_ranks_get_less_or_nothing() -> None:
    assert local_shapes((5, 3), Shard(dim=0), tp=4) == [(2, 3), (2, 3), (1, 3), (0, 3)]


def test_negative_dim_counts_from_the_end() -> None:
    assert local_shapes((4, 6), Shard(dim=-1), tp=2) == [(4, 3), (4, 3)]


def test_few_key_heads_are_shared_by_neighbours() -> None:
    assert feature_bounds(Shard(dim=0, heads=KEYS), 64, 8, what="k") == tuple(
        (head * 16, head * 16 + 16) for head in (0, 0, 1, 1, 2, 2, 3, 3)
    )


def test_tp_that_does_not_divide_heads_is_refused_with_those_that_do() -> None:
    heads = Heads(count=32, setting="num_attention_heads")
    with pytest.raises(RequestError, match=r"tp=3 .*num_attention_heads=32.* a\.q_proj.* 1, 2, 4, 8, 16, 32$"):
        feature_bounds(Shard(dim=0, heads=heads), 4096, 3, what="a.q_proj.weight")


def test_query_heads_are_never_shared() -> None:
    with pytest.raises(RequestError, match="tp=24 does not divide num_attention_heads=12"):
        feature_bounds(Shard(dim=0, heads=QUERY), 192, 24, what="q")


def test_heads_that_do_not_divide_the_tensor_are_refused() -> None:
    with pytest.raises(RequestError, match=r"q_proj: its 100 features do not consist of num_attention_heads=12"):
        feature_bounds(Shard(dim=0, heads=QUERY), 100, 2, what="q_proj")


def test_packed_blocks_are_split_by_themselves() -> None:
    placement = PackedShard(dim=0, sizes=(6, 4), blocks=(Shard(dim=0),) * 2)
    second = layouts((10,), placement, 2, what="w")[1]
    assert second.shape == (5,)
    assert [(piece.box, piece.corner) for piece in second.pieces] == [(((3, 6),), (0,)), (((8, 10),), (3,))]


def test_packed_blocks_of_one_rank_are_one_piece() -> None:
    placement = PackedShard(dim=0, sizes=(6, 4), blocks=(Shard(dim=0),) * 2)
    assert len(layouts((10,), placement, 1, what="w")[0].pieces) == 1


def test_packed_sizes_that_do_not_add_up_are_refused() -> None:
    placement = PackedShard(dim=0, sizes=(6, 6), blocks=(Shard(dim=0),) * 2)
    with pytest.raises(RequestError, match=r"c_attn: dim 0 has 10 indices, but its packed blocks \(6, 6\) take 12"):
        layouts((10,), placement, 2, what="c_attn")


def test_each_packed_block_of_scales_ends_in_a_partial_index() -> None:
    # 200 features are two rows of 128; gate and up have two rows each.
    placement = PackedShard(dim=0, sizes=(200, 200), blocks=(Shard(dim=0, unit=128),) * 2, features_per_index=128)
    assert local_shapes((4, 3), placement, tp=2) == [(2, 3), (2, 3)]


def test_boundary_inside_an_index_is_refused() -> None:
    placement = PackedShard(dim=0, sizes=(384,), blocks=(Shard(dim=0, heads=QUERY),), features_per_index=128)
    with pytest.raises(RequestError, match="scale: a split at feature 96 falls inside one of its indices"):
        layouts((3,), placement, 4, what="scale")


def test_dim_that_the_tensor_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match=r"w: a rule splits dim 2, but its shape is \[4, 4\]"):
        layouts((4, 4), Shard(dim=2), 2, what="w")


def test_experts_go_to_groups_whole() -> None:
    assert local_shapes((5, 8, 3), ExpertShard(inner=Shard(dim=1)), tp=2, ep=2) == [(3, 8, 3), (2, 8, 3)]


def test_experts_without_groups_are_split_over_tp() -> None:
    assert local_shapes((5, 8, 3), ExpertShard(inner=Shard(dim=1)), tp=2) == [(5, 4, 3), (5, 4, 3)]


def test_scalar_cannot_be_split_by_experts() -> None:
    with pytest.raises(RequestError, match="s: a rule splits it by experts, but it is a scalar"):
        layouts((), ExpertShard(inner=Replicate()), 2, what="s")


def test_packed_values_are_never_cut_even_without_a_unit() -> None:
    # Five int32 of eight values each: the third rank gets the last one.
    assert feature_bounds(Shard(dim=0, features_per_index=8), 40, 3, what="w") == ((0, 16), (16, 32), (32, 40))
