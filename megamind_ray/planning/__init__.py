"""Manifest, mesh and hardware -> a plan."""

from megamind_ray.planning.demands import build_demands
from megamind_ray.planning.geometry import BoxRows, box_rows
from megamind_ray.planning.rules import load_rules

__all__ = ["BoxRows", "box_rows", "build_demands", "load_rules"]
