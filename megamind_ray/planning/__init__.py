"""Manifest, mesh and hardware -> a plan."""

from megamind_ray.planning.build import build_plan
from megamind_ray.planning.capacity import choose_keep_blocks, keep_budget_bytes, pool_budget_bytes
from megamind_ray.planning.compile import compile_agent, compile_rank, load_facts, relay_sources
from megamind_ray.planning.demands import build_demands
from megamind_ray.planning.fallback import Fallback, RuleSource
from megamind_ray.planning.geometry import BoxRows, box_rows
from megamind_ray.planning.known_links import with_known_links, without_leaving
from megamind_ray.planning.presets import preset, preset_names, preset_text, resolve_topology
from megamind_ray.planning.rules import load_rules
from megamind_ray.planning.spares import spares_beside
from megamind_ray.planning.topology_dump import dump_topology
from megamind_ray.planning.topology_file import load_topology, parse_topology

__all__ = [
    "BoxRows",
    "Fallback",
    "RuleSource",
    "box_rows",
    "build_demands",
    "build_plan",
    "choose_keep_blocks",
    "compile_agent",
    "compile_rank",
    "dump_topology",
    "keep_budget_bytes",
    "load_facts",
    "load_rules",
    "load_topology",
    "parse_topology",
    "pool_budget_bytes",
    "preset",
    "preset_names",
    "preset_text",
    "relay_sources",
    "resolve_topology",
    "spares_beside",
    "with_known_links",
    "without_leaving",
]
