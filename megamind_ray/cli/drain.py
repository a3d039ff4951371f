"""``megamind drain``: a node leaves the fleet, and nothing is lost with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import Address, AsJson, Fleet, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import RequestError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    from megamind_ray.core.departure import DrainReport

__all__ = ["EXAMPLES", "drain_command"]

EXAMPLES = examples(
    "megamind drain 10.0.0.7                 (by address; an id or its first digits, or the host's name)",
    "megamind drain 4f0c --wait 60 --json    (a load that is under way gets a minute)",
    "megamind drain 4f0c --force             (unloads what has ranks there, gives up what has no room elsewhere)",
    "megamind drain 4f0c --cancel            (loads use it again)",
)


def drain_command(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE",
            show_default=False,
            help="Ray's id of the node or its first digits, its address, or the name of its host.",
        ),
    ],
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", help="How long a load that is under way may take; 0: refuse at once."
        ),
    ] = 600.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Unload models with ranks there, and give up blocks that have no room elsewhere."),
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take it back: loads use the node again.")] = False,
    address: Address = None,
    fleet: Fleet = "default",
    as_json: AsJson = False,
) -> None:
    """Empties a node, so that it can leave the cluster: what it alone keeps of models is copied to others first.

    From the start on no load uses the node. A load that is under way is waited for. Then blocks that were kept for fast
    reloads, and that no other node has, go to the pools of the others, and the fleet's actors on the node end. Ray
    itself goes on there: end it as you started it (`ray stop` on the node) when this command says that the node can go.

    Where it is refused, or interrupted, nothing is lost, and the node stays marked; drain it once more, or --cancel.
    """
    with Output(as_json) as output:
        if cancel and force:
            raise RequestError("--cancel and --force: give one of them")
        from megamind_ray.cli.progress import LoadProgress
        from megamind_ray.cli.running import connect_running

        with connect_running(address, fleet) as cluster:
            if cancel:
                back = cluster.undrain(node)
                output.emit({"fleet": fleet, "node": back, "leaving": False}, f"loads use node {node} again")
                return
            # Anew: connecting let Ray put a handler of its own in place, which aborts the process.
            with terminated_as_interrupt(), LoadProgress() as progress:
                report = cluster.drain(node, force=force, wait_s=wait, on_progress=progress.show)
        output.emit(report.to_json(), _first_line(report), _more_lines(report))


def _first_line(report: DrainReport) -> str:
    return f"node {report.node} ({report.address}) can go: nothing of fleet {report.fleet} is left there"


def _more_lines(report: DrainReport) -> list[str]:
    copied = f"{report.copied_blocks} blocks, {format_bytes(report.copied_bytes)}, that it alone kept"
    lines = [f"  copied {copied}; {report.seconds:.1f} s, of which {report.waited_s:.1f} s waiting for a load"]
    lines += [f"  {format_bytes(nbytes)} to node {node}" for node, nbytes in report.holders.items()]
    if report.unloaded:
        lines.append(f"  unloaded {', '.join(report.unloaded)}")
    if report.lost_blocks:
        lines.append(f"  gave up {report.lost_blocks} blocks, {format_bytes(report.lost_bytes)}")
    return [*lines, *(f"  {note}" for note in report.notes)]
