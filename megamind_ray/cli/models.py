"""``megamind models`` and ``megamind unload``: what a fleet holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from megamind_ray.cli.options import Address, AsJson, Fleet, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import masked
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from megamind_ray.actors.messages import ModelInfo

__all__ = ["MODELS_EXAMPLES", "UNLOAD_EXAMPLES", "models_command", "unload_command"]

MODELS_EXAMPLES = examples("megamind models", "megamind models --address 10.0.0.1:6379 --json")
UNLOAD_EXAMPLES = examples("megamind unload deepseek")


def models_command(address: Address = None, fleet: Fleet = "default", as_json: AsJson = False) -> None:
    """Lists the models that a detached fleet has loaded."""
    with Output(as_json) as output:
        from megamind_ray.cli.running import connect_running
        from megamind_ray.report.tables import plain_table

        with connect_running(address, fleet) as cluster:
            models, leaving = cluster.models(), cluster.leaving
        rows = [
            (
                model.name,
                str(model.parallel),
                format_bytes(model.num_bytes),
                _kept(model),
                model.loaded_at,
                masked(model.uri),
            )
            for model in models
        ]
        text = plain_table(("model", "mesh", ">on devices", ">kept in the pool", "loaded at", "checkpoint"), rows)
        output.emit(
            {
                "fleet": fleet,
                "models": [{**asdict(model), "uri": masked(model.uri)} for model in models],
                "leaving": list(leaving),
            },
            text if rows else "no models",
            [f"node {node} is leaving: no load uses it" for node in leaving],
        )


def _kept(model: ModelInfo) -> str:
    num_nodes = sum(1 for nbytes in model.kept_by.values() if nbytes)
    return format_bytes(model.kept_bytes) + (f" on {num_nodes} nodes" if num_nodes > 1 else "")


def unload_command(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Name of the model.")],
    address: Address = None,
    fleet: Fleet = "default",
    as_json: AsJson = False,
) -> None:
    """Gives back the device memory and the pool blocks of one model."""
    with Output(as_json) as output:
        from megamind_ray.cli.running import connect_running

        with connect_running(address, fleet) as cluster:
            cluster.unload(name)
        output.emit({"fleet": fleet, "unloaded": name}, f"unloaded {name}")
