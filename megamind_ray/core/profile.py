"""The profile: settings that were measured to be faster than the defaults on one machine, and where that was."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megamind_ray.errors import RequestError

__all__ = ["PROFILE_SCHEMA", "Machine", "Measured", "Profile", "parse_profile", "render_profile"]

PROFILE_SCHEMA: Final = 1
_HEAD: Final = """\
# Settings that `megamind tune` measured to be faster than the defaults, on the machine below and nowhere else.
# `megamind tune --show` tells what is in force, `megamind tune --reset` removes this file, MEGAMIND_PROFILE=off
# leaves it unread.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What has to be the same for a measurement to hold.

    Attributes:
        hostname: Its name; home directories are shared by many machines.
        cpus: Processors; the same name may come back on a larger machine.
        release: Of this package; another one may read in another way.
    """

    hostname: str
    cpus: int
    release: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes:
        date: When, ISO 8601.
        path: The checkpoint, or the folder of the temporary one.
        file_system: Its type.
        device: What it is mounted from.
    """

    date: str
    path: str
    file_system: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Content of a profile.

    Attributes:
        schema: Version of the form; the other fields are empty for one that this release does not know.
        machine: Where it was measured.
        measured: On what.
        settings: By section and field, only those that differ from the defaults.
        gains: Of ``"section.field"``, in words; comments of the file, which are not read back.
    """

    schema: int = PROFILE_SCHEMA
    machine: Machine | None = None
    measured: Measured | None = None
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    gains: Mapping[str, str] = field(default_factory=dict)

    def foreign_reason(self, here: Machine) -> str | None:
        """Why it says nothing about this machine, or None where it does."""
        if self.schema != PROFILE_SCHEMA or self.machine is None:
            return f"it has schema {self.schema}, this release reads schema {PROFILE_SCHEMA}"
        there = self.machine
        if there.hostname != here.hostname:
            return f"it was measured on {there.hostname}, this is {here.hostname}"
        if there.cpus != here.cpus:
            return f"it was measured with {there.cpus} processors, there are {here.cpus} now"
        if there.release != here.release:
            return f"it was measured with release {there.release}, this is {here.release}"
        return None


def parse_profile(text: str, path: str) -> Profile:
    """Reads a profile.

    Args:
        text: Content of the file.
        path: The file, for messages.

    Raises:
        RequestError: It is not a profile.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from error
    schema = document.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise _broken(path, "it has no number `schema`")
    if schema != PROFILE_SCHEMA:
        return Profile(schema=schema)
    machine, measured = _table(document, "machine", path), _table(document, "measured", path)
    settings = document.get("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(fields, dict) for fields in settings.values()):
        raise _broken(path, "`settings` must have one table for each section")
    unknown = sorted(document.keys() - {"schema", "machine", "measured", "settings"})
    if unknown:
        raise _broken(path, f"it has an entry {unknown[0]!r}, which a profile has not")
    return Profile(
        machine=Machine(
            hostname=_text(machine, "machine.hostname", path),
            cpus=_count(machine, "machine.cpus", path),
            release=_text(machine, "machine.release", path),
        ),
        measured=Measured(
            date=_text(measured, "measured.date", path),
            path=_text(measured, "measured.path", path),
            file_system=_text(measured, "measured.file_system", path),
            device=_text(measured, "measured.device", path),
        ),
        settings=settings,
    )


def render_profile(profile: Profile) -> str:
    """A profile as TOML, which ``parse_profile`` reads."""
    machine, measured = profile.machine, profile.measured
    assert machine is not None, "a profile is written where it was measured"
    assert measured is not None, "a profile is written where it was measured"
    lines = [_HEAD + f"schema = {profile.schema}", "", "[machine]"]
    lines += [f"hostname = {_quoted(machine.hostname)}", f"cpus = {machine.cpus}"]
    lines += [f"release = {_quoted(machine.release)}", "", "[measured]"]
    lines += [f"{name} = {_quoted(getattr(measured, name))}" for name in ("date", "path", "file_system", "device")]
    if not profile.settings:
        lines += ["", "# No setting was faster than its default by more than the noise."]
    for section, fields in profile.settings.items():
        lines += ["", f"[settings.{section}]"]
        for name, value in fields.items():
            gain = profile.gains.get(f"{section}.{name}", "")
            lines.append(f"{name} = {_value(value)}" + (f"  # {_one_line(gain)}" if gain else ""))
    return "\n".join(lines) + "\n"


def _broken(path: str, problem: str) -> RequestError:
    return RequestError(
        f"profile {path}: {problem}; measure again with `megamind tune`, remove it with `megamind tune --reset`, "
        "or set MEGAMIND_PROFILE=off"
    )


def _table(document: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    table = document.get(name)
    if not isinstance(table, dict):
        raise _broken(path, f"it has no table `{name}`")
    return table


def _text(table: Mapping[str, Any], name: str, path: str) -> str:
    value = table.get(name.rpartition(".")[2])
    if not isinstance(value, str):
        raise _broken(path, f"`{name}` must be a text")
    return value


def _count(table: Mapping[str, Any], name: str, path: str) -> int:
    value = table.get(name.rpartition(".")[2])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _broken(path, f"`{name}` must be a number from 1 on")
    return value


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else _quoted(str(value))


def _quoted(text: str) -> str:
    # File names need not be valid text; what JSON escapes TOML escapes in the same way, but for DEL.
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
