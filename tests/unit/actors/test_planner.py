"""A planner by itself, in a cluster without nodes: who asks twice for the same load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import Lifetime, LoadRequest
from megamind_ray.actors.planner import Planner
from megamind_ray.actors.spawner import NodeResources
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.report import LoadReport
from megamind_ray.errors import ClusterError

BOUND_S = 20.0
REQUEST = LoadRequest(uri="/x", parallel=Parallel(), name=None, keep=True, config=Config())


class NoNodes:
    """A spawner that has nobody."""

    lineage = ""

    def take_command(self, epoch: Epoch) -> None: ...

    def members(self) -> list[tuple[str, Any]]:
        return []

    def nodes(self) -> list[NodeResources]:
        return []

    def here(self) -> NodeId:
        return NodeId("here")

    def agent(self, name: str, node: NodeId, lifetime: Lifetime) -> Any:
        raise NotImplementedError

    def worker(self, name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Any:
        raise NotImplementedError

    def kill(self, handle: Any) -> None:
        raise NotImplementedError


class Loader:
    """Loads nothing, and not before it may end."""

    def __init__(self, error: ClusterError | None = None) -> None:
        self.num_loads = 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self._error = error
        self.report = cast(LoadReport, object())

    def load(self, *_: Any, **__: Any) -> LoadReport:
        self.num_loads += 1
        self.has_begun.set()
        assert self.may_end.wait(BOUND_S)
        if self._error is not None:
            raise self._error
        return self.report


class Results(dict[str, Any]):
    """As a dict; it says when somebody finds a load under way."""

    def __init__(self) -> None:
        super().__init__()
        self.was_joined = threading.Event()

    def setdefault(self, key: str, default: Any = None) -> Any:
        found = super().setdefault(key, default)
        if found is not default:
            self.was_joined.set()
        return found


def planner_with(loader: Loader, results: Results) -> Planner:
    planner = Planner(Charter(fleet="f", lifetime="job", config=Config()), NoNodes())
    planner.models()  # returns when it has taken over what there is: nothing
    planner._loader, planner._results = cast(Any, loader), results
    return planner


@pytest.mark.parametrize("error", [None, ClusterError("it went wrong")])
def test_a_load_is_not_begun_twice_by_a_client_that_took_its_planner_for_lost(error: ClusterError | None) -> None:
    """The planner was silent for a while, then greeted the client, which asked again for what came of its load."""
    loader, results = Loader(error), Results()
    planner = planner_with(loader, results)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(planner.load, "ticket", REQUEST)
        assert loader.has_begun.wait(BOUND_S)
        second = threads.submit(planner.load, "ticket", REQUEST, True)
        was_joined = results.was_joined.wait(BOUND_S)
        loader.may_end.set()
        for call in (first, second):
            if error is None:
                assert call.result(BOUND_S) is loader.report
            else:
                assert call.exception(BOUND_S) is error
    assert was_joined
    assert not results
    assert loader.num_loads == 1
