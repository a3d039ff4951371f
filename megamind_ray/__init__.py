"""megamind-ray moves model weights: checkpoints onto every GPU of a Ray cluster, storage read once, bytes verified.

The names below are the public contract. They are imported on first use, so that ``import megamind_ray`` costs
milliseconds and needs neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megamind_ray.api.arena import Arena
    from megamind_ray.api.cluster import Cluster, LoadedModel, connect, down
    from megamind_ray.api.local import inspect, load_file, load_into, load_state_dict
    from megamind_ray.api.plan import plan
    from megamind_ray.api.simulate import simulate
    from megamind_ray.config import Config, load_config
    from megamind_ray.core.manifest import Manifest
    from megamind_ray.core.parallel import (
        Coords,
        ExpertShard,
        Heads,
        PackedShard,
        Parallel,
        Replicate,
        Rule,
        Shard,
    )
    from megamind_ray.core.plan import Plan
    from megamind_ray.core.progress import Progress
    from megamind_ray.core.report import LoadReport
    from megamind_ray.core.topology import Topology
    from megamind_ray.errors import (
        CapacityError,
        ClusterError,
        IntegrityError,
        MegamindError,
        RecordError,
        RequestError,
        SourceError,
    )

__all__ = [
    "Arena",
    "CapacityError",
    "Cluster",
    "ClusterError",
    "Config",
    "Coords",
    "ExpertShard",
    "Heads",
    "IntegrityError",
    "LoadReport",
    "LoadedModel",
    "Manifest",
    "MegamindError",
    "PackedShard",
    "Parallel",
    "Plan",
    "Progress",
    "RecordError",
    "Replicate",
    "RequestError",
    "Rule",
    "Shard",
    "SourceError",
    "Topology",
    "__version__",
    "connect",
    "down",
    "inspect",
    "load_config",
    "load_file",
    "load_into",
    "load_state_dict",
    "plan",
    "simulate",
]

_HOMES = {
    "megamind_ray.api.arena": ("Arena",),
    "megamind_ray.api.cluster": ("Cluster", "LoadedModel", "connect", "down"),
    "megamind_ray.api.local": ("inspect", "load_file", "load_into", "load_state_dict"),
    "megamind_ray.api.plan": ("plan",),
    "megamind_ray.api.simulate": ("simulate",),
    "megamind_ray.config": ("Config", "load_config"),
    "megamind_ray.core.manifest": ("Manifest",),
    "megamind_ray.core.parallel": (
        "Coords",
        "ExpertShard",
        "Heads",
        "PackedShard",
        "Parallel",
        "Replicate",
        "Rule",
        "Shard",
    ),
    "megamind_ray.core.plan": ("Plan",),
    "megamind_ray.core.progress": ("Progress",),
    "megamind_ray.core.report": ("LoadReport",),
    "megamind_ray.core.topology": ("Topology",),
    "megamind_ray.errors": (
        "CapacityError",
        "ClusterError",
        "IntegrityError",
        "MegamindError",
        "RecordError",
        "RequestError",
        "SourceError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
