"""Arguments of the public functions that are of another kind than they should be: what to give instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megamind_ray.api.arena import Arena
from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["require_arena", "require_config", "require_globs", "require_module", "require_parallel"]


def require_config(config: object) -> None:
    """Refuses what is neither None nor settings.

    Raises:
        RequestError: It is something else.
    """
    if config is not None and not isinstance(config, Config):
        given = f"overrides={config!r:.80}" if isinstance(config, dict) else "path, or overrides={...}"
        raise RequestError(f"config={config!r:.80}: give settings, config=mm.load_config({given})")


def require_parallel(parallel: object) -> None:
    """Refuses what is neither None nor a mesh.

    Raises:
        RequestError: It is something else.
    """
    if parallel is not None and not isinstance(parallel, Parallel):
        raise RequestError(f"parallel={parallel!r:.80}: give a mesh, for example parallel=mm.Parallel(tp=2)")


def require_arena(arena: object) -> None:
    """Refuses what is neither None nor an arena.

    Raises:
        RequestError: It is something else.
    """
    if arena is not None and not isinstance(arena, Arena):
        size = repr(arena) if isinstance(arena, (str, int)) else "'16GiB'"
        raise RequestError(
            f"arena={arena!r:.80}: give an arena, arena=mm.Arena({size:.80}), and use it again for the next load"
        )


def require_globs(include: str | Sequence[str] | None) -> list[str] | None:
    """The globs that ``include`` gives; None: all tensors.

    Raises:
        RequestError: There is none among them, or something that is no text.
    """
    if include is None:
        return None
    given = [include] if isinstance(include, str) else include
    globs = list(given) if isinstance(given, Iterable) else []
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise RequestError(
            f"include={include!r:.80}: give a glob on names of tensors, or a list of some, such as 'model.layers.0.*'; "
            "None, the default, takes all"
        )
    return globs


def require_module(module: object, uri: object) -> torch.nn.Module:
    """The module to fill.

    Raises:
        RequestError: It is none.
    """
    import torch

    if isinstance(module, torch.nn.Module):
        return module
    if isinstance(uri, torch.nn.Module) and isinstance(module, (str, os.PathLike)):
        raise RequestError(
            f"load_into({os.fspath(module)!r:.80}, module): the module comes first, load_into(module, uri)"
        )
    raise RequestError(
        f"load_into: the first argument is of type {type(module).__name__}; give a torch.nn.Module. For a dict of "
        "tensors there is load_state_dict(uri)"
    )
