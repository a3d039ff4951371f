from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Replicate, Rule, Shard
from megamind_ray.errors import RequestError
from megamind_ray.planning.naming import split_numbers
from megamind_ray.planning.rules import Decision, RuleBook, describe, load_rules


def decide(book: RuleBook, name: str) -> Decision:
    return book.decide(name, split_numbers(name)[0])


def test_first_matching_rule_with_a_placement_wins() -> None:
    book = RuleBook(
        [
            Rule(pattern="*.q_proj.weight", stage="layer"),
            Rule(pattern="*.q_proj.*", placement=Shard(dim=1)),
            Rule(pattern="*", placement=Replicate(), stage="all"),
        ]
    )
    decision = decide(book, "model.layers.0.self_attn.q_proj.weight")
    assert decision.placement == Shard(dim=1)
    assert decision.stage == "layer"


def test_no_rule_no_decision() -> None:
    assert decide(RuleBook([Rule(pattern="a.*", placement=Replicate())]), "b.weight").placement is None


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        ("model.layers.1.*", "model.layers.1.x", "model.layers.11.x"),
        ("model.layers.1*.x", "model.layers.12.x", "model.layers.2.x"),
        ("*.layers.[01].x", "model.layers.1.x", "model.layers.2.x"),
        ("*.layers.?.x", "model.layers.7.x", "model.layers.10.x"),
        ("*.expert_1.wi", "experts.expert_1.wi", "experts.expert_11.wi"),
        ("*pert_1.wi", "experts.expert_1.wi", "experts.expert_2.wi"),
        ("*0.weight", "layers.10.weight", "layers.11.weight"),
    ],
)
def test_globs_can_tell_numbers_apart(pattern: str, hit: str, miss: str) -> None:
    book = RuleBook([Rule(pattern=pattern, placement=Replicate())])
    for _ in range(2):  # the second time from what was looked up before
        assert decide(book, miss).placement is None
        assert decide(book, hit).placement is not None


def test_unit_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match=r"rule '\*\.x' \(user\): .* must be 1 or more, not 0"):
        RuleBook([Rule(pattern="*.x", placement=Shard(dim=0, unit=0))])


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Replicate(), "replicated"),
        (Shard(dim=1, unit=128), "split over tp by dim 1 in units of 128"),
        (Shard(dim=0, heads=Heads(count=8, setting="n")), "split over tp by dim 0 by n=8"),
        (
            ExpertShard(inner=PackedShard(dim=1, sizes=(4, 4), blocks=(Shard(dim=0),) * 2)),
            "experts over ep, with ep=1 blocks 4 + 4 of dim 1 each split over tp",
        ),
    ],
)
def test_placement_in_words(placement: Replicate, words: str) -> None:
    assert describe(placement) == words


EXAMPLE = """
[[rules]]
pattern = "*.q_proj.weight"
placement = "shard"
dim = 0
unit = 128

[[rules]]
pattern = "*.k_proj.weight"
placement = "shard"
dim = -2
features_per_index = 8
heads = { count = 4, setting = "num_key_value_heads", kv = true }

[[rules]]
pattern = "*.gate_up_proj.weight"
placement = "packed"
dim = 0
sizes = [10, 10]
unit = 2

[[rules]]
pattern = "*.experts.down_proj"
placement = "experts"
inner = { placement = "shard", dim = 2 }

[[rules]]
pattern = "embed.weight"
stage = "first"

[[rules]]
pattern = "*norm*"
placement = "replicate"
stage = "all"
"""


def test_rules_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(EXAMPLE)
    keys = Heads(count=4, setting="num_key_value_heads", kv=True)
    assert load_rules(file) == (
        Rule(pattern="*.q_proj.weight", placement=Shard(dim=0, unit=128)),
        Rule(pattern="*.k_proj.weight", placement=Shard(dim=-2, features_per_index=8, heads=keys)),
        Rule(
            pattern="*.gate_up_proj.weight",
            placement=PackedShard(dim=0, sizes=(10, 10), blocks=(Shard(dim=0, unit=2),) * 2),
        ),
        Rule(pattern="*.experts.down_proj", placement=ExpertShard(inner=Shard(dim=2))),
        Rule(pattern="embed.weight", stage="first"),
        Rule(pattern="*norm*", placement=Replicate(), stage="all"),
    )


def test_rules_are_read_from_json(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"rules": [{"pattern": "a", "placement": "shard", "dim": 1}]}))
    assert load_rules(file) == (Rule(pattern="a", placement=Shard(dim=1)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = 3", "one list named 'rules'"),
        ("rule = []", "one list named 'rules'"),
        ("rules = [", "cannot be read"),
        ("[[rules]]\nplacement = 'shard'", r"rule 1: 'pattern' is missing"),
        ("[[rules]]\npattern = 'a'", r"rule 1 \(a\): it sets neither"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shart'", "placement='shart'; take one of"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'", "dim=None; it must be an integer"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'\ndim = 0\nsize = 3", "'size' is not known here"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'\ndim = 0\nunit = 0", "unit=0; it must be an integer of 1"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'\ndim = true", "dim=True"),
        ("[[rules]]\npattern = 'a'\nplacement = 'packed'\ndim = 0", "sizes=None"),
        ("[[rules]]\npattern = 'a'\nstage = 'middle'", "stage='middle'; take one of layer, first, last, all"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'\ndim = 0\nunit = 2\nheads = {count = 2}", "exclude each other"),
        ("[[rules]]\npattern = 'a'\nplacement = 'shard'\ndim = 0\nheads = {number = 2}", "'number' is not known"),
        (
            "[[rules]]\npattern = 'a'\nplacement = 'experts'\ninner = {placement = 'experts'}",
            "inner: placement='experts'",
        ),
    ],
)
def test_mistakes_in_a_rules_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        load_rules(file)
    assert "rules.toml" in str(caught.value)


def test_missing_rules_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.toml: cannot be read"):
        load_rules(tmp_path / "none.toml")
