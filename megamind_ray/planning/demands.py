"""Manifest, mesh and rules -> what each rank needs (docs/design/0002)."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megamind_ray.core.demands import Demands, ModuleTensor
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import (
    ExpertShard,
    Heads,
    PackedShard,
    Parallel,
    Placement,
    Replicate,
    Rule,
    Shard,
    Stage,
)
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.errors import RequestError
from megamind_ray.planning.alignment import aligned_placements
from megamind_ray.planning.fallback import Fallback, RuleSource
from megamind_ray.planning.families import FAMILIES, family_rules
from megamind_ray.planning.naming import ModuleEntry, module_entries, split_numbers
from megamind_ray.planning.quantization import quantization
from megamind_ray.planning.rules import Decision, RuleBook, describe
from megamind_ray.planning.slices import SliceBuilder
from megamind_ray.planning.splits import require_heads
from megamind_ray.planning.stages import layer_of, partition
from megamind_ray.units import format_bytes

__all__ = ["build_demands"]

_NUM_LARGEST = 5


@dataclass(frozen=True, slots=True)
class _Staged:
    """Where names live: per entry and name the stages that hold it, and the stage of each layer."""

    stages: list[tuple[tuple[int, ...], ...]]
    stage_of_layer: tuple[int, ...]


def build_demands(
    manifest: Manifest,
    parallel: Parallel,
    *,
    rules: Sequence[Rule] = (),
    fallback_rules: Sequence[Rule] | RuleSource = (),
    max_replicated_share: float = 0.30,
    allow_replication: bool = False,
    include: Sequence[str] | None = None,
) -> Demands:
    """Says which bytes of the checkpoint each rank of the mesh needs, and what it makes of them.

    Args:
        manifest: The checkpoint.
        parallel: The mesh.
        rules: The user's rules; they go before all others.
        fallback_rules: Used after the built-in rules of the family, for example from transformers' own plan. A source
            is asked only if the mesh has more than dp, and tensors of two dims or more are left without a rule.
        max_replicated_share: With tp > 1, the share of the checkpoint's bytes that may be replicated over tp unless
            the user's own rules ask for it.
        allow_replication: Whether to accept any share.
        include: Globs on names in the module or on disk; only matching tensors are demanded. A tensor that is assembled
            from several on disk is taken whole. Stages and limits are those of the whole checkpoint.

    Raises:
        RequestError: The mesh does not fit the model, a rule does not fit a tensor, too much would be replicated, or a
            glob of ``include`` matches nothing.
    """
    entries = module_entries(manifest)
    own = (*rules, *_built_in(manifest, parallel))
    fallback = _fallback(manifest, parallel, own, entries, fallback_rules)
    book = RuleBook((*own, *fallback.rules))
    decisions = [_decide(book, entry) for entry in entries]
    placements = _placements(manifest, parallel, entries, decisions, any_rules=bool(rules))
    infos = list(manifest.tensors.values())
    sizes = [_nbytes(entry, infos) for entry in entries]
    if parallel.tp > 1 and not allow_replication:
        asked = {id(rule) for rule in rules}
        counted = [
            (size, entry.names[0])
            for entry, decision, placement, size in zip(entries, decisions, placements, sizes, strict=True)
            if _is_replicated(placement, parallel.ep) and id(decision.rule) not in asked
        ]
        hint = fallback.hint or _unmatched(manifest)
        _require_little_replication(counted, sum(sizes), parallel.tp, max_replicated_share, hint)
    staged = _stages(book, entries, sizes, parallel)
    chosen = _included(entries, infos, include, manifest.uri)
    builder = SliceBuilder(infos, parallel)
    for index in chosen:
        builder.add(entries[index], placements[index], staged.stages[index])
    tensors = tuple(_tensor(entries[i], decisions[i], placements[i], sizes[i]) for i in chosen)
    return builder.finish(tensors, staged.stage_of_layer)


def _built_in(manifest: Manifest, parallel: Parallel) -> tuple[Rule, ...]:
    try:
        return family_rules(manifest.config)
    except RequestError:
        # One rank takes all as it is; an incomplete config.json is no obstacle to that.
        if parallel.tp == parallel.pp == parallel.ep == 1:
            return ()
        raise


def _unmatched(manifest: Manifest) -> str:
    model_type = manifest.config.get("model_type")
    known = isinstance(model_type, str) and model_type in FAMILIES
    return f"no built-in rule for model_type={model_type!r} matches the names of these tensors" if known else ""


def _fallback(
    manifest: Manifest,
    parallel: Parallel,
    own: Sequence[Rule],
    entries: Sequence[ModuleEntry],
    source: Sequence[Rule] | RuleSource,
) -> Fallback:
    if not callable(source):
        return Fallback(
            rules=tuple(replace(rule, origin="fallback") if rule.origin == "user" else rule for rule in source)
        )
    if parallel.tp == parallel.pp == parallel.ep == 1:
        return Fallback()
    book = RuleBook(own)
    # Norms and the like may stay whole; asking for rules can take seconds.
    if all(len(entry.shape) < 2 or _decide(book, entry).placement is not None for entry in entries):
        return Fallback()
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shapes.setdefault(entry.template, entry.shape)
    return source(manifest.config, shapes)


def _placements(
    manifest: Manifest,
    parallel: Parallel,
    entries: Sequence[ModuleEntry],
    decisions: Sequence[Decision],
    *,
    any_rules: bool,
) -> list[Placement]:
    quant = quantization(manifest.config)
    if parallel.tp > 1 and not quant.known and not any_rules:
        raise RequestError(
            f"{manifest.uri} is quantised by {quant.method!r}, whose tensors cannot be split over tp={parallel.tp} "
            f"without rules for them; take tp=1, or give rules"
        )
    _require_fitting_heads(entries, decisions, parallel)
    placements = aligned_placements(entries, decisions, parallel, quant)
    if parallel.ep > 1 and not any(isinstance(placement, ExpertShard) for placement in placements):
        raise RequestError(f"ep={parallel.ep}, but no tensor of {manifest.uri} is split by experts; take ep=1")
    return placements


def _decide(book: RuleBook, entry: ModuleEntry) -> Decision:
    """The first name's decision; a tied name's where the first has no placement."""
    decision = book.decide(entry.names[0], entry.template)
    for name in entry.names[1:]:
        if decision.placement is None:
            decision = book.decide(name, split_numbers(name)[0])
    return decision


def _tensor(entry: ModuleEntry, decision: Decision, placement: Placement, nbytes: int) -> ModuleTensor:
    return ModuleTensor(
        name=entry.names[0],
        dtype=entry.dtype,
        shape=entry.shape,
        nbytes=nbytes,
        placement=describe(placement),
        reason=f"{decision.rule.origin}: {decision.rule.pattern}" if decision.rule else "no rule",
        replicated=_is_replicated(placement, 1),
    )


def _nbytes(entry: ModuleEntry, infos: Sequence[TensorInfo]) -> int:
    # Parts of a fused tensor are alike.
    num_parts = sum(len(group) for group in entry.parts)
    return num_parts * infos[int(entry.parts[0][0])].nbytes


def _is_replicated(placement: Placement, ep: int) -> bool:
    if isinstance(placement, ExpertShard):
        return ep == 1 and isinstance(placement.inner, Replicate)
    return isinstance(placement, Replicate)


def _require_fitting_heads(entries: Sequence[ModuleEntry], decisions: Sequence[Decision], parallel: Parallel) -> None:
    examples: dict[int, tuple[Decision, str]] = {}
    for entry, decision in zip(entries, decisions, strict=True):
        if id(decision) not in examples:
            examples[id(decision)] = (decision, entry.names[0])
    used: dict[Heads, str] = {}
    for decision, name in examples.values():
        placement = decision.placement
        if isinstance(placement, ExpertShard):
            placement = placement.inner if parallel.ep == 1 else None
        blocks = placement.blocks if isinstance(placement, PackedShard) else (placement,)
        for block in blocks:
            if isinstance(block, Shard) and block.heads is not None:
                used.setdefault(block.heads, name)
    # Query heads first: they are what people know, and key heads allow more.
    require_heads(sorted(used.items(), key=lambda item: item[0].kv), parallel.tp)


def _require_little_replication(
    counted: Sequence[tuple[int, str]], total: int, tp: int, max_share: float, hint: str
) -> None:
    """What the user's own rules replicate was asked for; it is not among ``counted`` (bytes, name)."""
    replicated = sum(size for size, _ in counted)
    if replicated <= max_share * total:
        return
    largest = sorted(counted, key=lambda item: (-item[0], item[1]))[:_NUM_LARGEST]
    listed = ", ".join(f"{name} ({format_bytes(size)})" for size, name in largest)
    raise RequestError(
        f"tp={tp}: {replicated / total:.0%} of the checkpoint's bytes ({format_bytes(replicated)}) would be "
        f"replicated on every tp rank, more than the {max_share:.0%} allowed; largest: {listed}. "
        f"Give rules that split them, or allow it with allow_replication=True (--allow-replication)"
        f"{f'; {hint}' if hint else ''}"
    )


def _stages(book: RuleBook, entries: Sequence[ModuleEntry], sizes: Sequence[int], parallel: Parallel) -> _Staged:
    homes = [[_home(book, name, entry, at) for at, name in enumerate(entry.names)] for entry in entries]
    # Encoders come before decoders, whatever the order on disk.
    layers = sorted(
        {home for names in homes for home in names if isinstance(home, tuple)},
        key=lambda layer: ("decoder" in layer[0], layer),
    )
    number = {layer: index for index, layer in enumerate(layers)}
    layer_bytes, ends = [0] * len(layers), defaultdict[str, int](int)
    for names, size in zip(homes, sizes, strict=True):
        for home in dict.fromkeys(names):
            if isinstance(home, tuple):
                layer_bytes[number[home]] += size
            else:
                ends[home] += size
    stage_of_layer = partition(layer_bytes, ends["first"], ends["last"], parallel.pp)
    held: dict[str | tuple[str, int], tuple[int, ...]] = {
        "first": (0,),
        "last": (parallel.pp - 1,),
        "all": tuple(range(parallel.pp)),
        **{layer: (stage_of_layer[index],) for layer, index in number.items()},
    }
    return _Staged([tuple(held[home] for home in names) for names in homes], stage_of_layer)


def _home(book: RuleBook, name: str, entry: ModuleEntry, at: int) -> Stage | tuple[str, int]:
    """The layer of a name, or the stages that a rule gives it; without either, all."""
    template, numbers = (entry.template, entry.numbers) if at == 0 else split_numbers(name)
    stage = book.decide(name, template).stage
    if stage is not None and stage != "layer":
        return stage
    layer = layer_of(template, numbers)
    if layer is None and stage == "layer":
        raise RequestError(f"{name}: a rule puts it on the stage of its layer, but its name has no layer's number")
    return layer or "all"


def _included(
    entries: Sequence[ModuleEntry], infos: Sequence[TensorInfo], include: Sequence[str] | None, uri: str
) -> list[int]:
    if include is None:
        return list(range(len(entries)))
    globs = [re.compile(fnmatch.translate(glob)) for glob in include]
    hits, chosen = [0] * len(globs), list[int]()
    for index, entry in enumerate(entries):
        names = dict.fromkeys((*entry.names, *(infos[i].name for group in entry.parts for i in group.tolist())))
        matched = [number for number, glob in enumerate(globs) if any(glob.match(name) for name in names)]
        for number in matched:
            hits[number] += 1
        if matched:
            chosen.append(index)
    for glob, count in zip(include, hits, strict=True):
        if not count:
            raise RequestError(f"include={glob!r} matches no tensor of {uri}; 'megamind inspect' lists the names")
    return chosen
