"""Where the profile of this machine is looked for, and whether it is used (docs/design/0014)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from megamind_ray.config.files import read_regular
from megamind_ray.config.layers import build
from megamind_ray.core.profile import Machine, Profile, parse_profile
from megamind_ray.errors import RequestError

__all__ = ["ProfileState", "ProfileStatus", "find_profile", "profile_path", "this_machine"]

ProfileState = Literal["in force", "absent", "off", "ignored"]

_REMEDY = "measure again with `megamind tune`, remove it with `megamind tune --reset`, or set MEGAMIND_PROFILE=off"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus:
    """What became of the profile.

    Attributes:
        path: Where it is, or would be; None where there is no home directory to look in.
        state: Whether it is used.
        reason: Why not, where it is ignored.
        profile: Its content, where there is one of a schema that is known.
    """

    path: Path | None
    state: ProfileState
    reason: str = ""
    profile: Profile | None = None


def profile_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the profile is: ``$MEGAMIND_PROFILE``, else ``megamind-ray/profile.toml`` in the user's configuration.

    Also where it would be if ``MEGAMIND_PROFILE`` were not ``off``. None where the environment names no home directory.
    """
    env = os.environ if environ is None else environ
    named = env.get("MEGAMIND_PROFILE", "")
    if named and named.lower() != "off":
        return Path(named)
    base = env.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # the specification of these folders has relative ones ignored
        home = env.get("HOME", "")
        base = f"{home}/.config" if home else ""
    return Path(base, "megamind-ray", "profile.toml") if base else None


def find_profile(environ: Mapping[str, str] | None = None) -> ProfileStatus:
    """Looks for the profile, and whether it is one of this machine.

    Raises:
        RequestError: It is broken, or ``MEGAMIND_PROFILE`` names a file that cannot be read.
    """
    env = os.environ if environ is None else environ
    path, named = profile_path(env), env.get("MEGAMIND_PROFILE", "")
    is_off = named.lower() == "off"
    if is_off or path is None:
        return ProfileStatus(path=path, state="off" if is_off else "absent")
    try:
        text = read_regular(path)
    except (OSError, ValueError) as error:
        return _without_profile(path, error, is_named=bool(named))
    found = parse_profile(text, str(path))
    reason = found.foreign_reason(this_machine())
    if reason is not None:
        return ProfileStatus(path=path, state="ignored", reason=reason, profile=found)
    try:
        build([("settings", found.settings)])
    except RequestError as error:
        raise RequestError(f"profile {path}: {error}; {_REMEDY}") from error
    return ProfileStatus(path=path, state="in force", profile=found)


def this_machine() -> Machine:
    """What a profile must have been measured on to be used here."""
    # By name: the package's own module leads to all others, as the contract of layers sees it.
    release: str = import_module("megamind_ray").__version__
    return Machine(hostname=socket.gethostname(), cpus=os.cpu_count() or 1, release=release)


def _without_profile(path: Path, error: OSError | ValueError, *, is_named: bool) -> ProfileStatus:
    """No profile was asked for by name: a home directory that is not there, or not this user's, is no mistake."""
    if not is_named and isinstance(error, FileNotFoundError | NotADirectoryError):
        return ProfileStatus(path=path, state="absent")
    if not is_named and isinstance(error, PermissionError):
        return ProfileStatus(path=path, state="ignored", reason="this user may not read it")
    raise RequestError(f"profile {path}: cannot be read ({error}); {_REMEDY}") from error
