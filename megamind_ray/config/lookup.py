"""The configuration of this process, from everything that says something about it."""

from __future__ import annotations

import dataclasses
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from megamind_ray.config.files import read_regular
from megamind_ray.config.layers import Layer, build
from megamind_ray.config.profiles import find_profile
from megamind_ray.config.sections import Config
from megamind_ray.core.field_types import type_hints
from megamind_ray.errors import RequestError

__all__ = ["load_config", "setting_origins"]

_log = logging.getLogger(__name__)

_PREFIX = "MEGAMIND_"
# Variables with the prefix that are not settings of this tree: files, and switches of the test suite.
_RESERVED = ("MEGAMIND_CONFIG", "MEGAMIND_PROFILE", "MEGAMIND_REQUIRE_", "MEGAMIND_TEST_")
# A program that loads a thousand files is told once why a profile is not for it.
_told: set[tuple[Path | None, str]] = set()


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    profile: bool = True,
) -> Config:
    """Builds the configuration.

    Args:
        path: TOML file; default is ``$MEGAMIND_CONFIG`` where set.
        overrides: By section and field; goes before file and environment.
        environ: In place of the process's environment (for tests).
        profile: Whether the profile of this machine counts. Not for settings that go to other machines, as those of a
            cluster do (docs/design/0014).

    Raises:
        RequestError: No such file, a key that is not known, a value that is not allowed, or a broken profile.
    """
    env = os.environ if environ is None else environ
    return build(_layers(path, overrides, env, profile=profile))


def setting_origins(
    path: str | Path | None = None, environ: Mapping[str, str] | None = None, *, profile: bool = True
) -> dict[str, str]:
    """Where the value of each setting that ``load_config`` gives comes from: ``"io.direct"`` -> ``"default"``.

    Raises:
        RequestError: As ``load_config``.
    """
    env = os.environ if environ is None else environ
    origins = {
        f"{section}.{item.name}": "default"
        for section, kind in type_hints(Config).items()
        for item in dataclasses.fields(kind)
    }
    for origin, layer in _layers(path, None, env, profile=profile):
        origins.update({f"{section}.{name}": origin for section, fields in layer.items() for name in fields})
    return origins


def _layers(
    path: str | Path | None,
    overrides: Mapping[str, Mapping[str, object]] | None,
    env: Mapping[str, str],
    *,
    profile: bool,
) -> list[Layer]:
    """What goes over the defaults, the weakest first, each with where it comes from."""
    layers: list[Layer] = []
    source = path if path is not None else env.get("MEGAMIND_CONFIG") or None
    if source is not None:
        layers.append((f"file {source}", _read_toml(Path(source))))
    layers += [("environment", _from_environ(env)), ("arguments", overrides or {})]
    found = find_profile(env) if profile else None
    if found is None or found.profile is None or found.state != "in force":
        if found is not None and found.state == "ignored":
            _tell(found.path, found.reason)
        return layers
    measured: list[Layer] = [(f"profile {found.path}", found.profile.settings), *layers]
    try:
        build(measured)
    except RequestError:
        build(layers)  # what is wrong without the profile, too, is the user's to correct
        _tell(found.path, "its settings cannot be joined with those of the file, environment or arguments")
        return layers
    return measured


def _tell(path: Path | None, reason: str) -> None:
    if (path, reason) not in _told:
        _told.add((path, reason))
        _log.warning("profile %s is not used: %s; run `megamind tune` here, or set MEGAMIND_PROFILE=off", path, reason)


def _read_toml(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        return tomllib.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"config file {path}: cannot be read ({error}); give a TOML file") from error


def _from_environ(env: Mapping[str, str]) -> dict[str, dict[str, object]]:
    values: dict[str, dict[str, object]] = {}
    for key, value in env.items():
        if not key.startswith(_PREFIX) or key.startswith(_RESERVED):
            continue
        section, _, name = key.removeprefix(_PREFIX).lower().partition("_")
        values.setdefault(section, {})[name] = value
    return values
