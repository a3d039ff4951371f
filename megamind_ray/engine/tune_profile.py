"""The profile on disk: what goes in, where the measured files are, writing and removing it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megamind_ray.config import this_machine
from megamind_ray.core.output_file import require_output_place, write_output
from megamind_ray.core.profile import Measured, Profile, render_profile
from megamind_ray.engine.tune_search import Trial, Values, median_ratio
from megamind_ray.errors import MegamindError, RequestError

__all__ = ["profile_of", "remove_profile", "require_writable", "write_profile"]


def profile_of(values: Values, defaults: Values, trials: Sequence[Trial], measured: Measured) -> Profile:
    """A profile of this machine with the values that differ from the defaults, and what each gained."""
    settings: dict[str, dict[str, object]] = {}
    gains: dict[str, str] = {}
    for name, value in values.items():
        if value != defaults[name]:
            section, _, field = name.partition(".")
            settings.setdefault(section, {})[field] = value
            gains[name] = _gain(name, value, trials)
    return Profile(machine=this_machine(), measured=measured, settings=settings, gains=gains)


def _gain(name: str, value: object, trials: Sequence[Trial]) -> str:
    """The last time it was taken: it may have been left for another value meanwhile."""
    trial = next(it for it in reversed(trials) if (it.knob, it.value, it.verdict) == (name, value, "taken"))
    shown = ", ".join(f"{median_ratio(pairs):.2f}x {condition}" for condition, pairs in trial.pairs.items())
    return f"{shown}, against {trial.instead_of}"


def require_writable(path: Path) -> None:
    """Makes sure before a minute of measuring that its result can be written.

    Raises:
        RequestError: It cannot.
    """
    target = require_output_place(path, "profile")
    # By os.path, which does not fail in a folder that may not be looked into.
    parent = next(folder for folder in target.parents if os.path.exists(folder))  # noqa: PTH110
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):  # noqa: PTH112
        raise RequestError(f"profile {path}: {parent} cannot be written to; name another file with --output")


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile; whoever reads meanwhile gets the old one or the new one.

    Raises:
        RequestError: Something else than a regular file is there.
        MegamindError: It cannot be written.
    """
    # A link stays one: people keep their settings in a repository.
    target = require_output_place(path, "profile")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_output(target, render_profile(profile))
    except OSError as error:
        raise MegamindError(
            f"profile {path}: cannot be written ({error.strerror}); name another file with --output"
        ) from error


def remove_profile(path: Path) -> bool:
    """Removes a profile; False where there was none.

    Raises:
        RequestError: It cannot be removed.
    """
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RequestError(f"profile {path}: cannot be removed ({error.strerror}); remove it yourself") from error
    return True
