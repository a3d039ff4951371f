"""What a checkpoint looks like, from the model's ``config.json`` alone (docs/design/0017)."""

from megamind_ray.planning.shapes.build import FAMILIES, shape_manifest
from megamind_ray.planning.shapes.formats import WEIGHTS
from megamind_ray.planning.shapes.ready import ready_config, ready_names

__all__ = ["FAMILIES", "WEIGHTS", "ready_config", "ready_names", "shape_manifest"]
