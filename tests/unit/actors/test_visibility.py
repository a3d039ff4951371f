"""Who is asked for a checkpoint's files, and who reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megamind_ray.actors import visibility
from megamind_ray.actors.visibility import look_around
from megamind_ray.config import Config, IoConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.errors import RequestError
from megamind_ray.io import open_manifest
from megamind_ray.testing.checkpoints import llama_checkpoint

HERE = NodeId("head")


class _Agent:
    """Answers at once with what it lacks; its method is called as an actor's is."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.lacks = self

    def remote(self, _root: str, _files: Any) -> Any:
        return self._answer


class _Fleet:
    def __init__(self, answers: dict[str, Any], *, here: str | None = None) -> None:
        self.agents = {NodeId(node): _Agent(answer) for node, answer in answers.items()}
        self._here = here
        self.here = HERE
        self.leaving: set[NodeId] = set()
        self.num_added = 0

    def add_agent_here(self) -> NodeId | None:
        if HERE in self.agents or self._here is None:
            return None
        self.num_added += 1
        self.agents[HERE] = _Agent(self._here)
        return HERE


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "settle", lambda refs, **_: list(refs))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder: Path = llama_checkpoint(tmp_path_factory.mktemp("llama"))
    return open_manifest(folder)


def test_where_all_can_read_nobody_is_named(manifest: Manifest) -> None:
    found = look_around(_Fleet({"n0": "", "n1": ""}), manifest, Config())
    assert (found.readers, found.notes) == (None, ())


def test_a_node_that_is_leaving_is_not_asked(manifest: Manifest) -> None:
    fleet = _Fleet({"n0": "no such file", "n1": ""})
    fleet.leaving = {NodeId("n1")}
    with pytest.raises(RequestError, match=r"none of 1 nodes can read it \(node n0"):
        look_around(fleet, manifest, Config())


def test_where_some_lack_the_files_the_others_read(manifest: Manifest) -> None:
    fleet = _Fleet({"n0": "no such file", "n1": "", "n2": OSError("gone")}, here="")
    found = look_around(fleet, manifest, Config())
    assert found.readers == {"n1"}
    assert "2 of 3 nodes lack the files" in found.notes[0]
    assert fleet.num_added == 0, "a node with GPUs has them"


def test_what_lies_on_the_planners_own_node_alone_is_read_there(manifest: Manifest) -> None:
    fleet = _Fleet({"n0": "no such file", "n1": "no such file"}, here="")
    assert look_around(fleet, manifest, Config()).readers == {HERE}
    # The next load finds the agent there.
    assert look_around(fleet, manifest, Config()).readers == {HERE}
    assert fleet.num_added == 1


@pytest.mark.parametrize("here", [None, "changed since"])
def test_what_nobody_can_read_is_refused_with_a_reason(manifest: Manifest, here: str | None) -> None:
    with pytest.raises(RequestError, match=r"none of \d nodes can read it \(node n0: no such file\)"):
        look_around(_Fleet({"n0": "no such file"}, here=here), manifest, Config())


def test_with_mirrors_all_nodes_try(manifest: Manifest, tmp_path: Path) -> None:
    config = Config(io=IoConfig(mirrors=(str(tmp_path),)))
    assert look_around(_Fleet({"n0": "no such file"}, here=""), manifest, config).readers is None


def test_a_fleet_on_the_planners_own_node_alone_is_not_asked(manifest: Manifest) -> None:
    """A file that changed since is a matter for its reads, which say so."""
    assert look_around(_Fleet({HERE: "changed since"}), manifest, Config()).readers is None
