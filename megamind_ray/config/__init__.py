"""The one configuration tree. The environment is read in this package and nowhere else.

Order, later wins: defaults, the profile that ``megamind tune`` wrote on this machine, a TOML file, ``MEGAMIND_*``
variables (``MEGAMIND_IO_CHUNK_BYTES`` is ``io.chunk_bytes``), arguments.
"""

from megamind_ray.config.environment import AwsEnvironment, aws_environment, hub_cache_path, ray_address
from megamind_ray.config.layers import overridden
from megamind_ray.config.lookup import load_config, setting_origins
from megamind_ray.config.profiles import ProfileState, ProfileStatus, find_profile, profile_path, this_machine
from megamind_ray.config.sections import (
    Config,
    DeadlineConfig,
    DirectMode,
    IoConfig,
    LoadConfig,
    PlacementConfig,
    PlanConfig,
    PoolConfig,
    RetryConfig,
    RoutingConfig,
    StragglerConfig,
    WireConfig,
    WireUse,
)

__all__ = [
    "AwsEnvironment",
    "Config",
    "DeadlineConfig",
    "DirectMode",
    "IoConfig",
    "LoadConfig",
    "PlacementConfig",
    "PlanConfig",
    "PoolConfig",
    "ProfileState",
    "ProfileStatus",
    "RetryConfig",
    "RoutingConfig",
    "StragglerConfig",
    "WireConfig",
    "WireUse",
    "aws_environment",
    "find_profile",
    "hub_cache_path",
    "load_config",
    "overridden",
    "profile_path",
    "ray_address",
    "setting_origins",
    "this_machine",
]
