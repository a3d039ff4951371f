"""What ``Cluster.load`` asks the planner for, with a planner that only listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from megamind_ray.actors.messages import LoadRequest
from megamind_ray.api.cluster import Cluster
from megamind_ray.config import Config, PlanConfig
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.planning import dump_topology, resolve_topology


class _Listener:
    """Takes requests and answers none."""

    def __init__(self) -> None:
        self.requests: list[LoadRequest] = []

    def load(self, request: LoadRequest, *_: object) -> None:
        self.requests.append(request)
        raise ClusterError("no answer")


def _cluster(listener: _Listener, topology: Path) -> Cluster:
    settings = Config(plan=PlanConfig(topology=str(topology)))
    return Cluster(cast("Any", listener), "10.0.0.1:6379", settings, on_close=lambda: None)


def test_the_topology_file_is_read_by_who_asks(tmp_path: Path) -> None:
    """The planner may run on a node that does not have the file."""
    known = resolve_topology("two-racks")
    (tmp_path / "fleet.toml").write_text(dump_topology(known), encoding="utf-8")
    listener = _Listener()

    with pytest.raises(ClusterError, match="no answer"):
        _cluster(listener, tmp_path / "fleet.toml").load("/models/m")

    assert listener.requests[0].known == known


def test_a_topology_file_that_is_not_there_is_refused_before_the_planner_is_asked(tmp_path: Path) -> None:
    listener = _Listener()

    with pytest.raises(RequestError, match=r"fleet\.toml: cannot be read"):
        _cluster(listener, tmp_path / "fleet.toml").load("/models/m")

    assert listener.requests == []
