"""``megamind plan``: what a load would do, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.options import AllowReplication, AsJson, Dp, Ep, Pp, RulesFile, Tp, examples
from megamind_ray.cli.output import Output
from megamind_ray.cli.shapes import Model, ModelOrSettings, Shapes, WeightFormat, which_model
from megamind_ray.errors import masked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.core.plan import Plan

__all__ = ["EXAMPLES", "plan_command"]

EXAMPLES = examples(
    "megamind plan /models/llama-3-70b --tp 8",
    "megamind plan s3://models/deepseek-v3 --tp 8 --pp 2 --topology topology.toml --save plan/",
    "megamind plan deepseek-v3 --shapes --weights int4 --tp 8",
    "megamind plan --config DIR --tp 8",
    "megamind plan /models/llama-3-8b --tp 2 --explain model.layers.0.self_attn.q_proj.weight",
)


def plan_command(
    model: Model = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", metavar="FILE", help="TOML file with nodes, GPUs, disks and networks."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Whether blocks stay in the pool.")] = True,
    rules: RulesFile = None,
    allow_replication: AllowReplication = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Write the whole plan there, as Parquet tables.")
    ] = None,
    explain: Annotated[
        list[str] | None,
        typer.Option("--explain", metavar="TENSOR", help="Say where this tensor goes and why; may be repeated."),
    ] = None,
    shapes: Shapes = False,
    weights: WeightFormat = None,
    config: ModelOrSettings = None,
    as_json: AsJson = False,
) -> None:
    """Plans a load: which rank goes to which GPU, who reads what, what is replicated, whether it fits.

    Needs no cluster. Without --topology the plan is made for nodes of eight 80 GiB GPUs.
    """
    with Output(as_json) as output:
        from rich.console import Group
        from rich.text import Text

        from megamind_ray.api.plan import plan
        from megamind_ray.config import load_config
        from megamind_ray.core.parallel import Parallel
        from megamind_ray.planning import load_rules

        uri, shapes, settings = which_model(model, config, shapes=shapes)
        made = plan(
            uri,
            parallel=Parallel(tp=tp, pp=pp, dp=dp, ep=ep),
            topology=topology,
            rules=load_rules(rules) if rules is not None else (),
            keep=keep,
            allow_replication=allow_replication,
            config=load_config(settings, profile=False),
            shapes=shapes,
            weights=weights,
        )
        hardware = "nominal nodes of eight 80 GiB GPUs" if topology is None else str(topology)
        document, parts = _told(made, hardware, explain or [])
        if shapes:
            document["shapes"] = True
            parts.insert(0, Text("from the sizes in config.json; no checkpoint was opened"))
        if save is not None:
            made.save(save)
            document["saved"] = str(save)
            parts.append(Text(f"\nplan saved in {save}"))
        output.emit(document, Group(*parts))


def _told(made: Plan, hardware: str, explain: Sequence[str]) -> tuple[dict[str, Any], list[RenderableType]]:
    """A plan, or where some of its tensors go, as a document and in words."""
    from rich.text import Text

    from megamind_ray.report.summary import summarize_plan
    from megamind_ray.report.tables import plan_tables
    from megamind_ray.report.terminal import printable

    summary = summarize_plan(made)
    document: dict[str, Any] = {**summary.to_json(), "topology": hardware}
    if not explain:
        return document, [Text(f"planned for {hardware}\n"), plan_tables(summary)]
    document["explained"] = {tensor: masked(made.explain(tensor)) for tensor in explain}
    return document, [Text("\n\n".join(printable(answer, keep="\n") for answer in document["explained"].values()))]
