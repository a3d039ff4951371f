"""Topologies that come with the package, and the one way in which a topology may be named."""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.topology_file import load_topology, parse_topology

__all__ = ["preset", "preset_names", "preset_text", "resolve_topology"]

_SUFFIX: Final = ".toml"
_FOLDER: Final = resources.files("megamind_ray.planning") / "topologies"


def preset_names() -> tuple[str, ...]:
    """The presets, sorted."""
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX)))


def preset_text(name: str) -> str:
    """The topology file of a preset, with its comments.

    Raises:
        RequestError: There is no such preset; the message lists those there are.
    """
    names = preset_names()
    if name not in names:
        raise RequestError(f"no topology preset is named {name!r}; {_advice(name, names)}")
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def preset(name: str) -> Topology:
    """A topology that comes with the package. Its figures are nominal: ``Topology.source`` says where they are from.

    Raises:
        RequestError: There is no such preset; the message lists those there are.
    """
    return parse_topology(preset_text(name), origin=f"preset {name}")


def resolve_topology(topology: Topology | str | os.PathLike[str]) -> Topology:
    """A topology as people name it.

    Args:
        topology: The hardware itself, the path of a topology file, or the name of a preset. A name has neither a slash
            nor a suffix; where a file is called so, the file is meant.

    Raises:
        RequestError: No such file or preset, or the file has a mistake; the message says where.
    """
    if isinstance(topology, Topology):
        return topology
    path = Path(topology)
    name = os.fspath(topology)
    if path.is_file() or os.sep in name or path.suffix:
        return load_topology(path)
    names = preset_names()
    if name not in names:
        raise RequestError(f"topology {name!r}: neither a file nor a preset; {_advice(name, names)}")
    return preset(name)


def _advice(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return f"take one of {', '.join(names)}, or the path of a TOML file{meant}"
