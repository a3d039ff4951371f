"""``megamind topology``: topology files of this machine, of a running fleet, and those that come with the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.options import Address, AsJson, ConfigFile, Fleet, examples
from megamind_ray.cli.output import Output, stderr_console
from megamind_ray.core.output_file import require_output_place, write_output
from megamind_ray.errors import MegamindError, RequestError
from megamind_ray.report.terminal import printable
from megamind_ray.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.core.ids import NodeId
    from megamind_ray.core.topology import Topology
    from megamind_ray.engine.measure import MeasureRequest, NodeMeasurement

__all__ = ["EXAMPLES", "topology_command"]

EXAMPLES = examples(
    "megamind topology --dir /models --out here.toml            (measures this machine)",
    "megamind topology --cluster --dir /models --out fleet.toml (each node of the running fleet)",
    "megamind topology --list                                   (presets)",
    "megamind topology --preset hgx-h100 > mine.toml            (to change, and to plan with)",
    "megamind topology --json                                   (figures with all their samples)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A topology file, and what there is to say about it.

    Attributes:
        text: The file.
        document: For ``--json``.
        figures: Lines on what was measured; none of a preset.
    """

    text: str
    document: dict[str, Any]
    figures: Sequence[str] = ()


def topology_command(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="The running fleet, each node measured by its own agent.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Measure nothing: print a preset.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="Measure nothing: list the presets.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            show_default=False,
            help="On the disk to measure: a temporary file is written there. Default: here; with --cluster none.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the topology file there, and print the figures in place of it."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=1,
            max=1024,
            show_default=False,
            help="On a machine without GPUs: how many to write. Default: 1.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, everything together.")] = 20.0,
    max_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Largest size of the temporary file.")
    ] = "1GiB",
    address: Address = None,
    fleet: Fleet = "default",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Writes the topology file of this machine, or of the running fleet: rates measured, not guessed.

    Disk, memory, processors and loopback are measured one by one, each figure three times or more, and the file says
    how far they scatter; a line at the end says what keeps a default. `megamind plan --topology FILE` plans for it, and
    takes the name of a preset too.
    """
    with Output(as_json) as output:
        _require_one_task(cluster=cluster, preset=preset, list_presets=list_presets, gpus=gpus)
        if list_presets:
            output.emit(*_listed())
            return
        if out is not None:
            _require_writable(out)
        if preset is not None:
            made = _preset(preset)
        elif cluster:
            made = _fleet(_request(folder, seconds, max_bytes), address, fleet, config)
        else:
            made = _machine(_request(folder or Path(), seconds, max_bytes), gpus)
        output.emit(*_told(made, out))


def _require_one_task(*, cluster: bool, preset: str | None, list_presets: bool, gpus: int | None) -> None:
    if cluster + (preset is not None) + list_presets > 1:
        raise RequestError("--cluster, --preset and --list: give one of them")
    if gpus is not None and (cluster or preset is not None or list_presets):
        raise RequestError("--gpus is for measuring this machine alone; leave it out")


def _request(folder: Path | None, seconds: float, max_bytes: str) -> MeasureRequest:
    from megamind_ray.engine.measure import MeasureRequest

    # Agents have other working directories.
    where = None if folder is None else folder.absolute()
    return MeasureRequest(folder=where, seconds=seconds, max_bytes=parse_bytes(max_bytes, what="--bytes"))


def _listed() -> tuple[dict[str, Any], RenderableType]:
    from megamind_ray.planning import preset, preset_names
    from megamind_ray.report.tables import plain_table

    presets = {name: preset(name) for name in preset_names()}
    document = {
        "presets": [
            {
                "name": name,
                "description": found.name,
                "num_nodes": len(found.nodes),
                "num_gpus": found.num_gpus,
                "source": found.source,
            }
            for name, found in presets.items()
        ]
    }
    rows = [(name, len(found.nodes), found.num_gpus, found.name) for name, found in presets.items()]
    return document, plain_table(("preset", ">nodes", ">GPUs", "what"), rows)


def _preset(name: str) -> _Made:
    from megamind_ray.planning import preset, preset_text

    document = {"topology": asdict(preset(name)), "figures": {}, "notes": {}}
    return _Made(text=preset_text(name), document=document)


def _machine(request: MeasureRequest, num_gpus: int | None) -> _Made:
    from megamind_ray.engine.measure import measure_node
    from megamind_ray.engine.measure_topology import machine_gpus, machine_topology

    gpus = machine_gpus(num_gpus)
    with _progress() as show:
        found = measure_node(request, devices=[gpu.index for gpu in gpus if gpu.kind == "cuda"], on_figure=show)
    topology = machine_topology(found, gpus)
    return _rendered(topology, {topology.nodes[0].id: found})


def _fleet(request: MeasureRequest, address: str | None, fleet: str, config: Path | None) -> _Made:
    from megamind_ray.actors.measuring import measure_fleet, measure_fleet_wires
    from megamind_ray.cli.running import connect_running
    from megamind_ray.config import load_config
    from megamind_ray.engine.measure_topology import measured_topology
    from megamind_ray.planning import without_leaving

    settings = load_config(config, profile=False)
    with connect_running(address, fleet) as cluster:
        topology = cluster.topology()
        leaving = [node.id for node in topology.nodes if node.is_leaving]
        topology = without_leaving(topology)
        with _progress() as show:
            show(f"{len(topology.nodes)} nodes of fleet {fleet}")
            found = measure_fleet(fleet, request, settings)
            show("wires between nodes")
            wires, missing = measure_fleet_wires(fleet, topology, settings)
    staying = {node.id: found[node.id] for node in topology.nodes if node.id in found}
    return _rendered(measured_topology(topology, staying, wires), staying, leaving, missing)


def _rendered(
    topology: Topology,
    found: Mapping[NodeId, NodeMeasurement],
    leaving: Sequence[NodeId] = (),
    missing: str = "",
) -> _Made:
    from megamind_ray.engine.measure_topology import measurement_comments
    from megamind_ray.planning import dump_topology

    comments = [*measurement_comments(found), *([missing] if missing else [])]
    comments += [f"node {node} is leaving the fleet (megamind drain): left out" for node in leaving]
    figures = {
        node: [{**asdict(figure), "value": figure.value} for figure in one.figures] for node, one in found.items()
    }
    notes = {node: list(one.notes) for node, one in found.items()}
    document = {"topology": asdict(topology), "figures": figures, "notes": notes, "leaving": list(leaving)}
    return _Made(text=dump_topology(topology, comments=comments), document=document, figures=comments)


def _told(made: _Made, out: Path | None) -> tuple[dict[str, Any], str, Sequence[str]]:
    """The file itself, or where it was written to and what was measured."""
    if out is None:
        # The first line alone is short enough not to be wrapped to the width of a terminal.
        first, *rest = made.text.splitlines()
        return {**made.document, "file": None}, first, rest
    try:
        write_output(out, made.text, what="--out")
    except OSError as error:
        raise MegamindError(f"--out {out}: cannot be written ({error.strerror}); name another file") from error
    lines = [*map(printable, made.figures), f"topology written to {out}"]
    return {**made.document, "file": str(out)}, "\n".join(lines), ()


def _require_writable(out: Path) -> None:
    """Before anything is measured.

    Raises:
        RequestError: It is a folder, or in none that can be written to.
    """
    parent = require_output_place(out, "--out").parent
    # By os.path, which does not fail in a folder that may not be looked into.
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):  # noqa: PTH112
        raise RequestError(f"--out {out}: {parent} is no folder that can be written to; name another file")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is measured now, where stderr is a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda _what: None
        return
    # Seldom: each refresh takes a core from what is measured.
    with console.status("", refresh_per_second=1) as status:
        yield lambda what: status.update(f"measuring: {what}")
