"""The application: its commands, and the one place where an error becomes an exit code.

Nothing here or at the top of a command module imports torch, ray or pyarrow: ``megamind --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import megamind_ray
from megamind_ray.cli import down, drain, inspect, load, models, plan, replay, timeline, topology, tune, verify
from megamind_ray.cli.exit_codes import DONE, FAILED, INTERRUPTED, WRONG_REQUEST, exit_code_of
from megamind_ray.cli.guarded_stdout import StdoutError, give_up_stdout, guarded_stdout
from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.output import error_document, print_error, print_json
from megamind_ray.errors import MegamindError

__all__ = ["app", "main"]

# What all mistakes in arguments derive from. Some releases of typer use click, others bring their own copy of it:
# the class is reached through one that both export.
_ARGUMENT_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="megamind",
    help="Loads model checkpoints onto every GPU of a Ray cluster.\n\n"
    "Exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted. "
    "With --json every command prints one JSON document to stdout, errors too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect_command)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("load", epilog=load.EXAMPLES)(load.load_command)
app.command("replay", epilog=replay.EXAMPLES)(replay.replay_command)
app.command("timeline", epilog=timeline.EXAMPLES)(timeline.timeline_command)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify_command)
app.command("models", epilog=models.MODELS_EXAMPLES)(models.models_command)
app.command("unload", epilog=models.UNLOAD_EXAMPLES)(models.unload_command)
app.command("drain", epilog=drain.EXAMPLES)(drain.drain_command)
app.command("topology", epilog=topology.EXAMPLES)(topology.topology_command)
app.command("tune", epilog=tune.EXAMPLES)(tune.tune_command)
app.command("down", epilog=down.EXAMPLES)(down.down_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"megamind {megamind_ray.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        The exit code: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with guarded_stdout():
            return _run(args, as_json="--json" in args)
    except StdoutError as error:
        give_up_stdout(error)
        return FAILED


def _run(args: list[str], *, as_json: bool) -> int:
    try:
        with terminated_as_interrupt():
            # Not standalone: typer then raises instead of ending the process. An int is the code of a typer.Exit.
            result = app(args, prog_name="megamind", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(as_json)
    except MegamindError as error:
        code = exit_code_of(error)
        _report(error_document(error, code), as_json)
        return code
    except _ARGUMENT_ERROR as error:
        return _wrong_arguments(error, as_json)
    except StdoutError:
        raise
    except Exception as error:  # noqa: BLE001 - the outermost frame: a bug must still give its document and code
        traceback.print_exc()
        _report(error_document(error, FAILED), as_json)
        return FAILED
    if result == INTERRUPTED:
        return _interrupted(as_json)
    return result if isinstance(result, int) else DONE


def _report(document: dict[str, Any], as_json: bool) -> None:
    print_error(document)
    if as_json:
        print_json(document)


def _interrupted(as_json: bool) -> int:
    with contextlib.suppress(OSError):  # the terminal may be what is gone
        _report(error_document(KeyboardInterrupt("interrupted"), INTERRUPTED), as_json)
    return INTERRUPTED


def _wrong_arguments(error: Any, as_json: bool) -> int:
    if not error.format_message():  # a group without a command, which has printed its help already
        return WRONG_REQUEST
    error.show(file=sys.stderr)
    if as_json:
        print_json(error_document(error, WRONG_REQUEST, message=error.format_message()))
    return WRONG_REQUEST
