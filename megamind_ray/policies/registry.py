"""From a name in the configuration to the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from megamind_ray.config import PlacementConfig, RoutingConfig
from megamind_ray.errors import RequestError
from megamind_ray.policies.placement.base import PlacementPolicy
from megamind_ray.policies.placement.best_fit import BestFitDecreasing
from megamind_ray.policies.placement.exact import Exact
from megamind_ray.policies.placement.first_fit import FirstFit
from megamind_ray.policies.placement.largest_first import LargestFirst
from megamind_ray.policies.placement.round_robin import RoundRobin
from megamind_ray.policies.placement.topology_blind import TopologyBlind
from megamind_ray.policies.routing.balanced import Balanced
from megamind_ray.policies.routing.base import RoutingPolicy

__all__ = ["PLACEMENT", "ROUTING", "placement_policy", "routing_policy"]

PLACEMENT: Final[Mapping[str, Callable[[], PlacementPolicy]]] = {
    "best_fit": BestFitDecreasing,
    "first_fit": FirstFit,
    "round_robin": RoundRobin,
    "largest_first": LargestFirst,
    "topology_blind": TopologyBlind,
    "exact": Exact,
}
ROUTING: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {"balanced": Balanced}

_PolicyT = TypeVar("_PolicyT")


def placement_policy(config: PlacementConfig) -> PlacementPolicy:
    """The placement policy that the configuration names.

    Raises:
        RequestError: There is none of that name; the message lists those there are.
    """
    return _make(PLACEMENT, config.policy, "placement.policy")


def routing_policy(config: RoutingConfig) -> RoutingPolicy:
    """The routing policy that the configuration names.

    Raises:
        RequestError: There is none of that name; the message lists those there are.
    """
    return _make(ROUTING, config.policy, "routing.policy")


def _make(known: Mapping[str, Callable[[], _PolicyT]], name: str, setting: str) -> _PolicyT:
    if name not in known:
        raise RequestError(f"config {setting} = {name!r}: there is no such policy; take one of {', '.join(known)}")
    return known[name]()
