"""``megamind load``: a checkpoint onto the GPUs of a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.exit_codes import mark_started
from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import (
    Address,
    AllowReplication,
    AsJson,
    ConfigFile,
    Dp,
    Ep,
    Fleet,
    Mirrors,
    Pp,
    RulesFile,
    SidecarPath,
    Tp,
    Uri,
    examples,
)
from megamind_ray.cli.output import Output
from megamind_ray.errors import CapacityError, MegamindError, RecordError, RequestError

if TYPE_CHECKING:
    from megamind_ray.config import Config
    from megamind_ray.core.report import LoadReport

__all__ = ["EXAMPLES", "load_command"]

EXAMPLES = examples(
    "megamind load /models/llama-3-8b --tp 2",
    "megamind load /mnt/nfs/llama-3-8b --tp 2 --mirror s3://models/llama-3-8b",
    "megamind load s3://models/deepseek-v3 --tp 8 --pp 2 --detach --name deepseek",
    "ray job submit --working-dir . -- megamind load /models/llama-3-70b --tp 8 --report /shared/report.json",
    "megamind load /models/llama-3-8b --tp 2 --record ./recorded    (then: megamind replay ./recorded)",
    "megamind load model.safetensors --tp 2 --num-gpus 2    (a local Ray with two logical GPUs)",
)


def load_command(
    uri: Uri,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model in the fleet; default: from the URI.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Whether blocks stay in the pool for a fast reload.")
    ] = True,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the model loaded when this command ends; `megamind down` ends it.")
    ] = False,
    rules: RulesFile = None,
    allow_replication: AllowReplication = False,
    sidecar: SidecarPath = None,
    mirror: Mirrors = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report there too, as JSON.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            help="Record the load there: report, timeline, events (see `megamind replay`), a trace for Perfetto.",
        ),
    ] = None,
    address: Address = None,
    fleet: Fleet = "default",
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", min=1, help="Logical GPUs of the local Ray, if this command starts one.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", metavar="SIZE", help="Memory for weights per GPU, for example 70GiB."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", metavar="SIZE", help="Object store of the local Ray, if this command starts one."),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Loads a checkpoint onto every GPU of the mesh: each byte read from storage once, verified, sliced per rank.

    With --mirror, weights that the checkpoint's own storage does not give, or gives wrong, are read there: name folders
    that hold the same files. Headers and indexes are read from the checkpoint's own folder alone, so all of its files
    must be there when a load begins. Without recorded checksums a mirror is used only where both storages have the same
    checksum of a file.

    Without --detach the model is loaded, reported and given back when the command ends.
    """
    with Output(as_json) as output, terminated_as_interrupt(), ExitStack() as stack:
        # Before anything is started: mistakes in options and files.
        from megamind_ray.config import load_config
        from megamind_ray.core.parallel import Parallel
        from megamind_ray.planning import load_rules, load_topology
        from megamind_ray.report.tables import report_tables

        settings = load_config(config, {"io": {"mirrors": mirror}} if mirror else None, profile=False)
        wanted: dict[str, Any] = {
            "parallel": Parallel(tp=tp, pp=pp, dp=dp, ep=ep),
            "name": name,
            "keep": keep,
            "rules": load_rules(rules) if rules is not None else (),
            "allow_replication": allow_replication,
            "sidecar": sidecar,
            "record": record,
        }
        fleet_options: dict[str, Any] = {
            "num_gpus": num_gpus,
            "device_memory": device_memory,
            "lifetime": "detached" if detach else "job",
            "fleet": fleet,
            "pool": pool,
            "config": settings,
        }
        _require_writable(report)
        if settings.plan.topology:
            load_topology(settings.plan.topology)
        if record is not None:
            from megamind_ray.api.record import record_folder

            stack.enter_context(record_folder(record))
        if settings.io.mirrors:
            from megamind_ray.io.copies import check_mirrors

            check_mirrors(uri, settings.io.mirrors, retry=settings.retry)
        if _starts_cluster(address):
            if detach:
                raise RequestError(
                    "--detach: the Ray that this command would start ends with it, and the model with that; start one "
                    "that stays (ray start --head, without GPUs with --num-gpus 2), then load into it"
                )
            _check_request(uri, wanted, settings, num_gpus)
        measured = _load(uri, wanted, address, fleet_options)
        written: list[str] = []
        if report is not None:
            _write_report(report, measured)
            written = [f"report written to {report.absolute()}"]
        if record is not None:
            written.append(f"record written to {record.absolute()}")
        output.emit(measured.to_json(), report_tables(measured), written)


def _starts_cluster(address: str | None) -> bool:
    """Whether a local cluster is started for the load. In a running one others may read what this machine cannot."""
    from megamind_ray.actors.connection import find_cluster
    from megamind_ray.config import ray_address

    return find_cluster(address, ray_address=ray_address()) is None


def _check_request(uri: str, wanted: Mapping[str, Any], settings: Config, num_gpus: int | None) -> None:
    """Looks at the checkpoint and the mesh as the planner will; that would say no some seconds later, in a new cluster.

    Raises:
        RequestError: There is no checkpoint, or the mesh does not fit the model or ``--num-gpus``.
        IntegrityError: A header is wrong.
        SourceError: The storage does not answer.
    """
    from megamind_ray.integrations.transformers import fallback_rules
    from megamind_ray.io import open_manifest
    from megamind_ray.planning import build_demands

    manifest = open_manifest(uri, sidecar=wanted["sidecar"], io=settings.io, retry=settings.retry)
    build_demands(
        manifest,
        wanted["parallel"],
        rules=wanted["rules"],
        fallback_rules=fallback_rules,
        max_replicated_share=settings.plan.max_replicated_share,
        allow_replication=wanted["allow_replication"],
    )
    if num_gpus is not None and num_gpus < wanted["parallel"].world:
        raise RequestError(
            f"{wanted['parallel']} needs {wanted['parallel'].world} GPUs, and --num-gpus {num_gpus} starts fewer; give "
            f"--num-gpus {wanted['parallel'].world}, or take a mesh of at most {num_gpus} ranks"
        )


def _load(uri: str, wanted: Mapping[str, Any], address: str | None, fleet_options: Mapping[str, Any]) -> LoadReport:
    """Connects, loads, and gives the model back, unless the fleet is to stay."""
    from megamind_ray.api.cluster import connect
    from megamind_ray.cli.progress import LoadProgress

    cluster = connect(address, **fleet_options)
    # Anew: connecting let Ray put a handler of its own in place, which aborts the process.
    with cluster, terminated_as_interrupt(), ExitStack() as given_back, LoadProgress() as progress:
        try:
            model = cluster.load(uri, **wanted, on_progress=progress.show)
            if fleet_options["lifetime"] == "job":
                # The fleet may be one that stays, which somebody else started.
                given_back.callback(model.unload)
            return model.report
        except RecordError as error:
            if fleet_options["lifetime"] != "job":
                raise
            given_back.callback(cluster.unload, error.model)
            raise MegamindError(f"{error.reason}; the load itself was done") from error
        except CapacityError as error:
            if progress.moving:
                mark_started(error)
            raise


def _require_writable(report: Path | None) -> None:
    if report is None:
        return
    from megamind_ray.core.output_file import require_output_place

    folder = require_output_place(report, "--report").parent
    # By os.path, which does not fail in a folder that may not be looked into.
    if not os.path.isdir(folder):  # noqa: PTH112
        raise RequestError(f"--report {report}: there is no folder {folder} for this user; make it first")


def _write_report(path: Path, report: LoadReport) -> None:
    from megamind_ray.core.output_file import write_output

    try:
        write_output(path, json.dumps(report.to_json(), indent=2) + "\n", what="--report")
    except OSError as error:
        raise MegamindError(
            f"--report {path}: cannot be written ({error.strerror}); the load itself was done"
        ) from error
