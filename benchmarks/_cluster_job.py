"""The driver of the cluster benchmark: runs in a host of the bed and obeys orders that come as files.

``order-0.json``, ``order-1.json``, ... in a folder that all hosts see; each is answered by ``answer-N.json``. What goes
wrong is part of an answer: the benchmark writes it down and goes on. It ends when the order is to end, or when nobody
has given it one for some minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import megamind_ray as mm
from megamind_ray.api.simulate import run_simulation
from megamind_ray.core.ids import NodeId
from megamind_ray.sim import NodeLoss, Simulation
from megamind_ray.testing.digests import rank_digests

__all__: list[str] = []

_PATIENCE_S: Final = 600.0
_POLL_S: Final = 0.01
Answer = dict[str, Any]


class _Job:
    """A fleet of this driver's, and the model that is loaded.

    Args:
        settings: Of the configuration, by section and field.
        device_memory: Arena budget of each GPU.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, object]], device_memory: int) -> None:
        self._settings = settings
        self._open = ExitStack()
        # The fleet is this one's; loads have connections of their own, with settings of their own.
        self._open.enter_context(mm.connect(config=self._config({}), device_memory=device_memory))
        self._loaded = ExitStack()
        self._model: mm.LoadedModel | None = None
        self._times: Answer = {}  # of the last load, also of one that failed

    def nodes(self) -> Answer:
        """Addresses by Ray's ids of nodes, which reports name."""
        import ray

        return {"nodes": {row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes()}}

    def load(self, *, uri: str, mesh: Mapping[str, int], settings: Any, record: str | None) -> Answer:
        cluster = self._loaded.enter_context(mm.connect(config=self._config(settings)))
        # Hosts share the machine's clock: these can be compared with times of the benchmark.
        began_s = time.monotonic()
        try:
            self._model = cluster.load(uri, mm.Parallel(**mesh), keep=False, record=record)
        finally:
            ended_s = time.monotonic()
            self._times = {"began_s": began_s, "ended_s": ended_s}
        return {"report": self._model.report.to_json(), **self._times}

    def digests(self) -> Answer:
        """What each rank holds, by rank."""
        assert self._model is not None, "nothing is loaded"
        return {"held": self._model.run(rank_digests)}

    def unload(self) -> Answer:
        with self._loaded:
            if self._model is not None:
                self._model.unload()
            self._model = None
        return {}

    def predict(
        self, *, uri: str, mesh: Mapping[str, int], settings: Any, topology: str, loss: Mapping[str, Any] | None
    ) -> Answer:
        """Seconds that the same load takes by the simulator, and where its plan puts the ranks; with a loss, if any."""
        config = self._config(settings)
        plan = mm.plan(uri, mm.Parallel(**mesh), topology, config=config)
        whole = run_simulation(plan, topology, config=config)
        report, lost_s = whole.report, 0.0
        if loss is not None:
            homes = plan.tables["ranks"]["node"].to_pylist()
            lost_s = _read_by(whole, loss["share"])
            node = NodeId(loss["victim"] if loss["victim"] in homes else homes[0])
            fault = NodeLoss(node=node, at_s=lost_s, noticed_after_s=loss["noticed_after_s"])
            report = run_simulation(plan, topology, config=config, faults=[fault]).report
        return {
            "lost_s": lost_s,
            "seconds": report.seconds["transfer"],
            "bottleneck": report.bottleneck,
            "hosts": [str(node) for node in plan.tables["ranks"]["node"].to_pylist()],
        }

    def wires(self, *, settings: Any) -> Answer:
        """Bytes per second that each wire brings between nodes, and what there is to say about one that is missing."""
        from megamind_ray.actors.measuring import measure_fleet_wires

        with mm.connect(config=self._config(settings)) as cluster:
            found, missing = measure_fleet_wires("default", cluster.topology(), self._config(settings))
        return {"bytes_per_s": dict(found), "missing": missing}

    def close(self) -> Answer:
        self._loaded.close()
        self._open.close()
        return {}

    def obey(self, order: dict[str, Any]) -> Answer:
        """Executes an order; the errors of this package and of Ray are answers too."""
        todo: dict[str, Callable[..., Answer]] = {
            "nodes": self.nodes,
            "load": self.load,
            "digests": self.digests,
            "unload": self.unload,
            "predict": self.predict,
            "wires": self.wires,
            "close": self.close,
        }
        name = order.pop("do")
        self._times = {}
        try:
            return todo[name](**order)
        except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark is to show it
            return {"error": f"{type(error).__name__}: {error}", **self._times}

    def _config(self, more: Mapping[str, Mapping[str, object]]) -> mm.Config:
        sections = {*self._settings, *more}
        merged = {name: {**self._settings.get(name, {}), **more.get(name, {})} for name in sections}
        return mm.load_config(overrides=merged, profile=False)


def _read_by(simulation: Simulation, share: float) -> float:
    """When this share of the bytes had come from storage."""
    spans = simulation.timeline.spans.select(["kind", "end_s", "nbytes"]).to_pylist()
    reads = sorted((span["end_s"], span["nbytes"]) for span in spans if span["kind"] == "read")
    left = share * sum(nbytes for _, nbytes in reads)
    for end_s, nbytes in reads:
        left -= nbytes
        if left <= 0:
            return float(end_s)
    return 0.0


def main() -> None:
    """Obeys orders until it is told to end."""
    folder, settings, device_memory = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    job = _Job(settings, device_memory)
    number, name = 0, ""
    while name != "close":
        path = folder / f"order-{number}.json"
        until_s = time.monotonic() + _PATIENCE_S
        while not path.exists():
            if time.monotonic() > until_s:
                raise SystemExit(f"no order within {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        order = json.loads(path.read_text())
        name = order["do"]
        draft = folder / f"answer-{number}.draft"
        draft.write_text(json.dumps(job.obey(order)))
        draft.rename(folder / f"answer-{number}.json")
        number += 1


if __name__ == "__main__":
    main()
