"""``megamind plan``: what a load would do, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.options import AllowReplication, AsJson, Dp, Ep, Pp, RulesFile, Tp, examples
from megamind_ray.cli.output import Output
from megamind_ray.cli.shapes import Model, ModelOrSettings, Shapes, WeightFormat, which_model
from megamind_ray.cli.whatif import Told, compared, overflowing, planned_or_nearest, predicted
from megamind_ray.errors import RequestError, masked

if TYPE_CHECKING:
    from megamind_ray.core.plan import Plan

__all__ = ["EXAMPLES", "plan_command"]

_NOMINAL = "nominal nodes of eight 80 GiB GPUs"
EXAMPLES = examples(
    "megamind plan /models/llama-3-70b --tp 8",
    "megamind plan s3://models/deepseek-v3 --tp 8 --pp 2 --topology topology.toml --save plan/",
    "megamind plan deepseek-v3 --shapes --weights int4 --tp 8 --topology founding",
    "megamind plan deepseek-v3 --shapes --tp 8 --topology founding --offload",
    "megamind plan /models/llama-3-70b --topology hgx-h100 --sweep tp,pp",
    "megamind plan /models/llama-3-70b --tp 8 --topology hgx-h100 --compare tp=4,pp=2 --compare topology=hgx-h200",
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
        typer.Option(
            "--topology",
            metavar="FILE|NAME",
            help="TOML file with nodes, GPUs, disks and networks, or a preset (megamind topology --list).",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Whether blocks stay in the pool, for a fast reload.")
    ] = True,
    rules: RulesFile = None,
    allow_replication: AllowReplication = False,
    predict: Annotated[
        bool | None,
        typer.Option(
            "--predict/--no-predict",
            show_default=False,
            help="How long the load takes and what bounds it. Default: with --topology; without, rates are guesses.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            help="Write the prediction there: report, events, timeline as HTML and for Perfetto.",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="CASE",
            help="Beside this plan, another one: tp=4,pp=2 or topology=NAME or a setting (io.extent_bytes=64MiB); "
            "may be repeated.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="AXES",
            help="Layouts side by side: all powers of two on these axes, which are tp, pp, dp and ep.",
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="Where the GPUs are too small: what stays in host memory, and what streaming it costs."
        ),
    ] = False,
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
    """Plans a load: whether it fits, which rank goes to which GPU, who reads what, how long it takes.

    Needs no cluster. Without --topology the plan is made for nodes of eight 80 GiB GPUs whose rates are guesses: a time
    is predicted only where --predict, --record, --compare or --sweep asks for one, and it says that it is guessed.
    """
    with Output(as_json) as output, ExitStack() as stack:
        from rich.console import Group
        from rich.text import Text

        from megamind_ray.api.plan import nominal_topology
        from megamind_ray.api.record import record_folder
        from megamind_ray.api.shapes import open_planned
        from megamind_ray.api.whatif import Case, Study
        from megamind_ray.config import load_config
        from megamind_ray.core.parallel import Parallel
        from megamind_ray.planning import load_rules, resolve_topology

        _require_one_task(compare, sweep, offload=offload, single=[save, explain, record, predict])
        uri, shapes, settings_file = which_model(model, config, shapes=shapes)
        settings = load_config(settings_file, profile=False)
        mesh = Parallel(tp=tp, pp=pp, dp=dp, ep=ep)
        hardware = nominal_topology(mesh.world) if topology is None else resolve_topology(topology)
        _require_no_bare_name(uri, shapes=shapes)
        folder = stack.enter_context(record_folder(record))
        manifest = open_planned(uri, shapes=shapes, weights=weights, sidecar=None, config=settings)
        study = Study(
            manifest, rules=load_rules(rules) if rules is not None else (), allow_replication=allow_replication
        )
        case = Case(label=str(mesh), parallel=mesh, topology=hardware, config=settings, keep=keep)
        planned_for = _NOMINAL if topology is None else str(topology)
        if compare or sweep is not None:
            document, parts = compared(study, case, compare or [], sweep, guessed=topology is None)
        elif offload:
            document, parts = overflowing(study, case)
        else:
            made = planned_or_nearest(study, case)
            document, parts = _told(made, planned_for, explain or [])
            if predict or record or (predict is None and topology is not None and not explain):
                more, shown = predicted(made, case, folder, guessed=topology is None)
                document, parts = document | more, parts + shown
            if save is not None:
                made.save(save)
                document["saved"] = str(save)
                parts.append(Text(f"\nplan saved in {save}"))
        if shapes:
            document["shapes"] = True
            parts.insert(0, Text("from the sizes in config.json; no checkpoint was opened"))
        output.emit(document, Group(*parts))


def _require_one_task(
    compare: Sequence[str] | None, sweep: str | None, *, offload: bool, single: Sequence[object]
) -> None:
    several = bool(compare) or sweep is not None
    if several + offload + any(single) > 1:
        raise RequestError(
            "--compare and --sweep, --offload, and --save, --explain, --record and --predict are different questions: "
            "ask one of them at a time"
        )


def _require_no_bare_name(uri: str, *, shapes: bool) -> None:
    from megamind_ray.planning.shapes import ready_names

    if not shapes and uri in ready_names() and not Path(uri).exists():
        raise RequestError(
            f"{uri}: no such file or folder; add --shapes to plan for the model of that name, without a checkpoint"
        )


def _told(made: Plan, hardware: str, explain: Sequence[str]) -> Told:
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
