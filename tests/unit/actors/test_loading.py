"""What is written down of a load, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megamind_ray.actors import loading
from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.loading import Loader
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.ticket import Ticket
from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import ClusterError

REQUEST = LoadRequest(uri="/x", parallel=Parallel(), name=None, keep=True, config=Config())


class FullJournal:
    """Nobody takes what is to be written; ``under_way`` is what the next write would say."""

    def __init__(self) -> None:
        self.under_way: object = None

    def begin(self, job: object, _transfer: object) -> None:
        self.under_way = job
        raise ClusterError("no agent took it")

    def end(self, _models: object) -> None:
        self.under_way = None
        raise ClusterError("no agent took it")


def test_a_load_that_could_not_be_written_down_is_not_under_way_for_what_is_written_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a successor would begin it anew, for a client that was told of its failure."""
    transfer = SimpleNamespace(load=LoadId("m#1"))
    prepared = SimpleNamespace(request=REQUEST, transfer=transfer, notes=())
    monkeypatch.setattr(loading, "open_checkpoint", lambda _: None)
    monkeypatch.setattr(loading, "prepare", lambda *_, **__: prepared)
    journal, catalogue = FullJournal(), SimpleNamespace(free_name=lambda _: "m", journaled=lambda: ())
    loader = Loader(
        cast(Any, None),
        cast(Any, catalogue),
        cast(Any, journal),
        Charter(fleet="f", lifetime="job", config=Config()),
        Epoch(1, "p"),
        cast(Any, None),
    )
    with pytest.raises(ClusterError, match="no agent took it"):
        loader.load("ticket", Ticket(), REQUEST)
    assert journal.under_way is None
