"""``megamind tune``: the settings with which this machine reads fastest, measured and kept for later runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.interrupts import terminated_as_interrupt
from megamind_ray.cli.options import AsJson, ConfigFile, examples
from megamind_ray.cli.output import Output, stderr_console
from megamind_ray.errors import RequestError, masked
from megamind_ray.units import format_bytes, format_duration, format_rate, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from megamind_ray.config import ProfileStatus
    from megamind_ray.engine.tune_result import TuneResult

__all__ = ["EXAMPLES", "tune_command"]

EXAMPLES = examples(
    "megamind tune /models/llama-3-8b                  (the disk that models are on)",
    "megamind tune --dir /scratch --seconds 120        (a temporary checkpoint there)",
    "megamind tune /models/llama-3-8b --dry-run --json (measure, write no profile)",
    "megamind tune --show                              (what is in force, and where it comes from)",
    "megamind tune --reset                             (back to the defaults)",
)

_USED_BY = (
    "later runs on this machine use it where they read in their own process; `megamind load`, and what else goes "
    "through a cluster, does not: put the settings into a file for --config there"
)


def tune_command(
    uri: Annotated[
        str | None,
        typer.Argument(
            metavar="URI",
            show_default=False,
            help="A checkpoint on this machine; without one, a temporary checkpoint is written and removed.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, everything together.")] = 60.0,
    max_bytes: Annotated[
        str,
        typer.Option(
            "--bytes", metavar="SIZE", help="Most bytes of one read, of memory and of the temporary checkpoint."
        ),
    ] = "2GiB",
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Where a temporary checkpoint is written.")
    ] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and write no profile.")] = False,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the profile there; MEGAMIND_PROFILE=FILE uses it."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing: show each setting and where its value comes from.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Measure nothing: remove the profile.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measures which settings read fastest on this machine, and writes them to a profile that later runs load.

    What is read is dropped from the page cache again and again. A setting is changed only where the gain is larger
    than the noise, and only if it holds in a second measurement against the defaults.

    The profile is for what reads in its own process on this machine (load_file, load_state_dict, load_into, inspect,
    verify). `megamind load`, and whatever else goes through a cluster, does not use it: put what was found into a file
    for --config there.
    """
    with Output(as_json) as output, terminated_as_interrupt():
        _require_one_task(uri, show=show, reset=reset, others=dry_run or output_file is not None)
        if show:
            output.emit(*_show(config))
        elif reset:
            output.emit(*_reset())
        else:
            output.emit(*_tune(uri, seconds, max_bytes, folder, config, output_file, dry_run=dry_run))


def _require_one_task(uri: str | None, *, show: bool, reset: bool, others: bool) -> None:
    if show + reset > 1 or ((show or reset) and (uri is not None or others)):
        raise RequestError("--show and --reset measure nothing: give one of them alone")


def _tune(
    uri: str | None,
    seconds: float,
    max_bytes: str,
    folder: Path,
    config: Path | None,
    output_file: Path | None,
    *,
    dry_run: bool,
) -> tuple[dict[str, Any], RenderableType]:
    from megamind_ray.config import load_config
    from megamind_ray.engine.tune import tune
    from megamind_ray.engine.tune_profile import require_writable, write_profile
    from megamind_ray.engine.tune_result import TuneRequest

    # Without the profile: it is what is measured anew, and may be broken.
    request = TuneRequest(
        uri=uri,
        folder=folder,
        seconds=seconds,
        max_bytes=parse_bytes(max_bytes, what="--bytes"),
        config=load_config(config, profile=False),
    )
    target = None if dry_run else _target(output_file)
    if target is not None:
        require_writable(target)
    with _progress() as show_progress:
        result = tune(request, on_progress=show_progress)
    notes = list(result.notes)
    if target is not None and not result.num_measured:
        notes.append(f"no profile was written to {target}, as nothing was measured; one that is there stays")
        target = None
    elif target is not None and result.num_measured < len(result.trials) and not result.changes():
        notes.append(
            f"no profile was written to {target}, as only a part was measured and nothing found to change; one that is "
            "there stays: take more --seconds"
        )
        target = None
    if target is not None:
        write_profile(result.profile(), target)
    notes += _use_notes(result, target, config)
    document = {**result.to_json(), "profile": None if target is None else str(target), "notes": notes}
    return document, _tables(result, target, notes)


def _target(output_file: Path | None) -> Path:
    from megamind_ray.config import profile_path

    target = output_file if output_file is not None else profile_path()
    if target is None:
        raise RequestError("there is no home directory to write a profile to; name a file with --output")
    return target.absolute()


def _use_notes(result: TuneResult, target: Path | None, config: Path | None) -> list[str]:
    """What keeps the profile, or a part of it, from being used."""
    from megamind_ray.config import find_profile, profile_path, setting_origins

    if target is None:
        return []
    origins = setting_origins(config, profile=False)
    notes = [
        f"{name} is set by {origins[name]}, which goes before the profile"
        for name in result.changes()
        if origins[name] != "default"
    ]
    if target != (profile_path() or Path()).absolute():
        notes.append(f"MEGAMIND_PROFILE={target} makes later runs use the profile")
    elif find_profile().state == "off":
        notes.append("MEGAMIND_PROFILE=off keeps later runs from using the profile")
    return notes


def _tables(result: TuneResult, target: Path | None, notes: list[str]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from megamind_ray.engine.tune_result import shown_value
    from megamind_ray.report.tables import count_of, plain_table

    measured, changes = result.measured, result.changes()
    place = " on ".join(part for part in (measured.file_system, measured.device) if part)
    head = (
        f"{measured.path} ({place or 'file system unknown'}): {format_bytes(result.sample_bytes)} a read, "
        f"{' and '.join(result.conditions)}, {result.num_measured} of {count_of(len(result.trials), 'candidate')}, "
        f"{format_duration(result.seconds)}"
    )
    trials = plain_table(
        ("setting", ">tried", ">instead of", "verdict", "why"),
        (
            (
                trial.knob,
                shown_value(trial.knob, trial.value),
                shown_value(trial.knob, trial.instead_of),
                trial.verdict,
                trial.reason,
            )
            for trial in result.trials
        ),
    )
    if changes:
        verdict = "faster than the defaults: " + ", ".join(
            f"{name} = {shown_value(name, value)}" for name, value in changes.items()
        )
    elif result.comparison is not None:
        verdict = f"the defaults are kept: what looked faster did not hold ({result.comparison.reason})"
    else:
        verdict = _nothing_found(result)
    written = "" if target is None else f"\nprofile written to {target}\n{_USED_BY}"
    parts: list[RenderableType] = [Text(head + "\n"), trials, Text()]
    if result.comparison is not None:
        parts += [_before_and_after(result), Text()]
    return Group(*parts, Text(verdict + written), *(Text(f"note: {note}") for note in notes))


def _nothing_found(result: TuneResult) -> str:
    """Why the defaults stay, which is no finding where hardly anything was measured."""
    done, wanted = result.num_measured, len(result.trials)
    if done == wanted:
        return "the defaults are kept: nothing was faster by more than the noise"
    if not done:
        return f"the defaults are kept, and may not be the fastest: none of {wanted} candidates was measured"
    return (
        f"the defaults are kept, and may not be the fastest: only {done} of {wanted} candidates "
        f"{'was' if done == 1 else 'were'} measured, without a gain of more than the noise"
    )


def _before_and_after(result: TuneResult) -> RenderableType:
    from statistics import median

    from megamind_ray.engine.tune_search import median_ratio
    from megamind_ray.report.tables import plain_table

    assert result.comparison is not None
    rows = [
        (
            condition,
            format_rate(result.sample_bytes / median(pair.old_s for pair in pairs)),
            format_rate(result.sample_bytes / median(pair.new_s for pair in pairs)),
            f"{median_ratio(pairs):.2f}x of {len(pairs)} pairs",
        )
        for condition, pairs in result.comparison.pairs.items()
    ]
    return plain_table(("measured again", ">defaults", ">tuned", ">ratio"), rows)


def _show(config: Path | None) -> tuple[dict[str, Any], RenderableType]:
    import dataclasses

    from rich.console import Group
    from rich.text import Text

    from megamind_ray.config import find_profile, load_config, setting_origins
    from megamind_ray.engine.tune_result import shown_value
    from megamind_ray.report.tables import plain_table

    found, origins = find_profile(), setting_origins(config)
    sections = dataclasses.asdict(load_config(config))
    values = {
        f"{section}.{name}": _without_secrets(value)
        for section, fields in sections.items()
        for name, value in fields.items()
    }
    document = {
        "profile": {
            "path": None if found.path is None else str(found.path),
            "state": found.state,
            "reason": found.reason or None,
            "machine": _as_dict(found.profile and found.profile.machine),
            "measured": _as_dict(found.profile and found.profile.measured),
        },
        "settings": [{"name": name, "value": values[name], "origin": origin} for name, origin in origins.items()],
    }
    rows = ((name, shown_value(name, values[name]), origin) for name, origin in origins.items())
    return document, Group(Text(_profile_line(found) + "\n"), plain_table(("setting", "value", "from"), rows))


def _without_secrets(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_without_secrets, value))
    return masked(value) if isinstance(value, str) else value


def _as_dict(value: Any) -> dict[str, Any] | None:
    import dataclasses

    return dataclasses.asdict(value) if value is not None else None


def _profile_line(found: ProfileStatus) -> str:
    if found.state == "off":
        return "profile: switched off by MEGAMIND_PROFILE=off"
    if found.path is None:
        return "profile: none, there is no home directory to look in"
    if found.state == "absent":
        return f"profile: none; `megamind tune` writes {found.path}"
    if found.state == "ignored":
        return f"profile: {found.path} is not used: {found.reason}"
    measured = found.profile.measured if found.profile is not None else None
    when = f", measured {measured.date} on {measured.path}" if measured is not None else ""
    return f"profile: {found.path}{when}; not used for loads through a cluster"


def _reset() -> tuple[dict[str, Any], str]:
    from megamind_ray.config import profile_path
    from megamind_ray.engine.tune_profile import remove_profile

    path = profile_path()
    removed = path is not None and remove_profile(path)
    text = f"removed {path}" if removed else f"there is no profile{'' if path is None else f' at {path}'}"
    return {"profile": None if path is None else str(path), "removed": removed}, text


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar of the time that has gone, where stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr_console()
    # Seldom: each refresh takes a core from what is measured.
    bars = Progress(
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=1,
        disable=not console.is_terminal,
    )
    with bars:
        task = bars.add_task("", total=1.0)
        yield lambda share, what: bars.update(task, completed=share, description=what)
