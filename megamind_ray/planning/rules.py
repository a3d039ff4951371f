"""Which rule decides about a tensor, and reading rules from a file.

A file of rules, TOML (or JSON with the same keys)::

    [[rules]]
    pattern = "*.q_proj.weight"      # glob on the whole name in the module; * also matches dots
    placement = "shard"              # shard, packed, replicate or experts; leave it out to set the stage alone
    dim = 0                          # negative counts from the end
    unit = 128                       # features that stay together, default 1
    features_per_index = 1           # 128 for a row of block scales, 8 for four-bit values in an int32
    heads = { count = 32, setting = "num_attention_heads", kv = false }   # in place of unit
    stage = "layer"                  # layer, first, last or all

    [[rules]]
    pattern = "*.mlp.gate_up_proj.weight"
    placement = "packed"             # the dim is a concatenation of blocks, each split by itself
    dim = 0
    sizes = [11008, 11008]           # features of each block; unit (or heads) holds for all of them

    [[rules]]
    pattern = "*.experts.down_proj"
    placement = "experts"            # dim 0 counts experts
    inner = { placement = "shard", dim = 2 }   # over tp, where ep = 1
    separate = false                 # true where there is one tensor per expert in the module
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from megamind_ray.config.files import read_regular
from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Placement, Replicate, Rule, Shard, Stage
from megamind_ray.errors import RequestError

__all__ = ["Decision", "RuleBook", "describe", "load_rules"]

_INNER_KEYS = {
    "replicate": frozenset[str](),
    "shard": frozenset({"dim", "unit", "features_per_index", "heads"}),
    "packed": frozenset({"dim", "sizes", "unit", "features_per_index", "heads"}),
}
_KEYS = {**_INNER_KEYS, "experts": frozenset({"inner", "separate"})}


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the rules say about a tensor.

    Attributes:
        placement: None where no rule has one.
        rule: The rule that gave it.
        stage: None where no rule has one.
    """

    placement: Placement | None
    rule: Rule | None
    stage: Stage | None


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    rule: Rule
    matches: re.Pattern[str]
    by_number: bool


class RuleBook:
    """Rules in order; the first that matches and has a placement (or a stage) gives it.

    Layers of a model get equal decisions, so a decision is looked up once per template of names, except for rules whose
    glob tells numbers apart.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        for rule in rules:
            _require_sane(rule)
        self._rules = [_Compiled(rule, _compile(rule.pattern), _tells_numbers(rule.pattern)) for rule in rules]
        self._candidates: dict[str, tuple[_Compiled, ...]] = {}
        self._decisions: dict[tuple[_Compiled, ...], Decision] = {}
        self._by_template: dict[str, Decision] = {}

    def decide(self, name: str, template: str) -> Decision:
        """The decision about a module tensor.

        Args:
            name: Its name.
            template: The name with 0 for each number, as ``naming.split_numbers`` gives it.
        """
        known = self._by_template.get(template)
        if known is not None:
            return known
        candidates = self._candidates.get(template)
        if candidates is None:
            candidates = self._candidates[template] = tuple(
                item for item in self._rules if item.by_number or item.matches.match(template)
            )
        chosen = tuple(item for item in candidates if not item.by_number or item.matches.match(name))
        decision = self._decisions.get(chosen)
        if decision is None:
            decision = self._decisions[chosen] = _first([item.rule for item in chosen])
        if not any(item.by_number for item in candidates):
            self._by_template[template] = decision
        return decision


def _require_sane(rule: Rule) -> None:
    placement = rule.placement.inner if isinstance(rule.placement, ExpertShard) else rule.placement
    blocks = placement.blocks if isinstance(placement, PackedShard) else (placement,)
    grains = [block.unit for block in blocks if isinstance(block, Shard)]
    grains += [block.heads.count for block in blocks if isinstance(block, Shard) and block.heads]
    if isinstance(placement, Shard | PackedShard):
        grains.append(placement.features_per_index)
    if any(grain < 1 for grain in grains):
        raise RequestError(
            f"rule {rule.pattern!r} ({rule.origin}): unit, features_per_index and heads must be 1 or more, "
            f"not {min(grains)}"
        )


@lru_cache(maxsize=8192)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


@lru_cache(maxsize=8192)
def _tells_numbers(pattern: str) -> bool:
    """Whether the glob may match one number and not another: then names with equal templates differ."""
    if "?" in pattern or "[" in pattern:
        return True
    return any(re.fullmatch(r"[expert]*_?\d+", fragment) for fragment in re.split(r"[.*]", pattern))


def _first(rules: Sequence[Rule]) -> Decision:
    placed = next((rule for rule in rules if rule.placement is not None), None)
    staged = next((rule for rule in rules if rule.stage is not None), None)
    return Decision(placed.placement if placed else None, placed, staged.stage if staged else None)


def describe(placement: Placement) -> str:
    """The placement in words."""
    match placement:
        case Replicate():
            return "replicated"
        case Shard():
            return f"split over tp by dim {placement.dim}{_grain(placement)}"
        case PackedShard():
            sizes = " + ".join(map(str, placement.sizes))
            return f"blocks {sizes} of dim {placement.dim} each split over tp{_grain(placement.blocks[0])}"
        case ExpertShard():
            return f"experts over ep, with ep=1 {describe(placement.inner)}"


def _grain(shard: Shard) -> str:
    if shard.heads is not None:
        return f" by {shard.heads.setting}={shard.heads.count}"
    return f" in units of {shard.unit}" if shard.unit > 1 else ""


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Reads rules from a TOML file, or from a JSON file whose name ends in ``.json``; the module says the format.

    Raises:
        RequestError: It cannot be read, or has a key or a value that is not known.
    """
    path = Path(path)
    try:
        text = read_regular(path)
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"rules file {path}: cannot be read ({error})") from error
    rows = document.get("rules") if isinstance(document, dict) else None
    if not isinstance(rows, list) or set(document) != {"rules"}:
        raise RequestError(f"rules file {path}: it must have one list named 'rules' ([[rules]]) and nothing else")
    return tuple(_parse_rule(row, f"rules file {path}, rule {number}") for number, row in enumerate(rows, start=1))


def _parse_rule(row: Any, where: str) -> Rule:
    if not isinstance(row, dict):
        raise RequestError(f"{where}: {row!r} is not a table of settings")
    fields = dict(row)
    pattern, stage = fields.pop("pattern", None), fields.pop("stage", None)
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(f"{where}: 'pattern' is missing; write for example pattern = \"*.q_proj.weight\"")
    where = f"{where} ({pattern})"
    if stage is not None and stage not in get_args(Stage):
        raise RequestError(f"{where}: stage={stage!r}; take one of {', '.join(get_args(Stage))}")
    if "placement" not in fields:
        _only(fields, frozenset(), where)
        if stage is None:
            raise RequestError(f"{where}: it sets neither 'placement' nor 'stage'")
        return Rule(pattern=pattern, stage=stage)
    return Rule(pattern=pattern, placement=_placement(fields, _KEYS, where), stage=stage)


def _placement(fields: Any, kinds: Mapping[str, frozenset[str]], where: str) -> Placement:
    if not isinstance(fields, Mapping):
        raise RequestError(f"{where}: {fields!r:.80} is not a table of settings with a placement")
    kind = fields.get("placement")
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"{where}: placement={kind!r}; take one of {', '.join(kinds)}")
    _only(fields, kinds[kind] | {"placement"}, where)
    if kind == "replicate":
        return Replicate()
    if kind == "experts":
        inner = _placement(fields.get("inner", {"placement": "replicate"}), _INNER_KEYS, f"{where}, inner")
        separate = fields.get("separate", False)
        if not isinstance(separate, bool):
            raise RequestError(f"{where}: separate={separate!r}; take true or false")
        assert not isinstance(inner, ExpertShard)
        return ExpertShard(inner=inner, separate=separate)
    if "heads" in fields and "unit" in fields:
        raise RequestError(f"{where}: 'heads' and 'unit' exclude each other; a head is the unit")
    shard = Shard(
        dim=_integer(fields, "dim", None, where),
        unit=_integer(fields, "unit", 1, where, minimum=1),
        features_per_index=_integer(fields, "features_per_index", 1, where, minimum=1),
        heads=_heads(fields["heads"], where) if "heads" in fields else None,
    )
    if kind == "shard":
        return shard
    sizes = fields.get("sizes")
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise RequestError(
            f"{where}: sizes={sizes!r}; write the features of each block, for example [4096, 1024, 1024]"
        )
    return PackedShard(
        dim=shard.dim,
        sizes=tuple(sizes),
        blocks=(shard,) * len(sizes),
        features_per_index=shard.features_per_index,
    )


def _heads(value: Any, where: str) -> Heads:
    if not isinstance(value, dict):
        raise RequestError(f"{where}: heads={value!r}; write for example heads = {{ count = 32 }}")
    _only(value, frozenset({"count", "setting", "kv"}), f"{where}, heads")
    setting, kv = value.get("setting", "heads"), value.get("kv", False)
    if not isinstance(setting, str) or not isinstance(kv, bool):
        raise RequestError(f"{where}: heads has setting={setting!r}, kv={kv!r}; take a name, and true or false")
    return Heads(count=_integer(value, "count", None, f"{where}, heads", minimum=1), setting=setting, kv=kv)


def _integer(
    fields: Mapping[str, Any], key: str, default: int | None, where: str, *, minimum: int | None = None
) -> int:
    value = fields.get(key, default)
    if type(value) is not int or (minimum is not None and value < minimum):
        least = "" if minimum is None else f" of {minimum} or more"
        raise RequestError(f"{where}: {key}={value!r}; it must be an integer{least}")
    return value


def _only(fields: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in fields:
        if key not in known:
            raise RequestError(f"{where}: {key!r} is not known here; known: {', '.join(sorted(known)) or 'nothing'}")
