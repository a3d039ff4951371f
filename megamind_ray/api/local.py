"""Checkpoints in this process, without a cluster."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from megamind_ray.api.arena import Arena, memory_of
from megamind_ray.api.arguments import require_arena, require_config, require_globs, require_module
from megamind_ray.config import Config, load_config
from megamind_ray.core.location import parse_location
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.errors import RequestError
from megamind_ray.io import open_manifest

if TYPE_CHECKING:
    import torch

    from megamind_ray.engine.module_load import ModuleLoad

__all__ = ["inspect", "load_file", "load_into", "load_state_dict"]

Uri = str | os.PathLike[str]
Device = Union[str, int, "torch.device"]


def inspect(uri: Uri, *, sidecar: Uri | bool | None = None, config: Config | None = None) -> Manifest:
    """Reads what describes a checkpoint, and none of its weights.

    Args:
        uri: A safetensors file, a folder with some, or an index; a path or a URI of any storage.
        sidecar: Recorded checksums: None uses those beside the checkpoint, a path others, False none.
        config: Settings; by default those of the environment.

    Raises:
        RequestError: There is no checkpoint.
        IntegrityError: A header or an index is wrong.
        SourceError: The storage does not answer.
    """
    require_config(config)
    settings = config if config is not None else load_config()
    return open_manifest(uri, sidecar=sidecar, io=settings.io, retry=settings.retry)


def load_file(
    path: Uri,
    device: Device | None = None,
    *,
    arena: Arena | None = None,
    sidecar: Uri | bool | None = None,
) -> dict[str, torch.Tensor]:
    """Loads a safetensors file, as ``safetensors.torch.load_file`` does: same names, dtypes, shapes and values.

    The memory is this process's own, not the page cache's. On the host all tensors share one mapping, which is given
    back with the last of them; each has a storage of its own all the same, so ``torch.save`` of one writes one. With
    a sidecar of checksums beside the file, every chunk is checked against it.

    Args:
        path: The file; a URI works too.
        device: Where to, as torch takes it: a name, a ``torch.device`` or the index of a CUDA device; ``cpu`` by
            default, or the arena's.
        arena: Memory to use again instead of fresh memory.
        sidecar: Recorded checksums: None uses those beside the file, a path others, False none.

    Raises:
        RequestError: There is no such file, it is a folder, torch lacks one of its dtypes (F6), or the arena is on
            another device.
        CapacityError: The arena has no room, or this process may not have as much memory.
        IntegrityError: The file is damaged, changed, or does not match its sidecar.
        SourceError: The storage does not answer.
    """
    require_arena(arena)
    config = load_config()
    manifest = inspect(path, sidecar=sidecar, config=config)
    if len(manifest.files) != 1 or not _names_file(path, manifest):
        raise RequestError(f"{os.fspath(path)}: is not one safetensors file; load folders with load_state_dict")
    return _load(manifest, list(manifest.tensors.values()), device, config, arena)


def load_state_dict(
    uri: Uri,
    device: Device | None = None,
    include: str | Sequence[str] | None = None,
    *,
    arena: Arena | None = None,
    sidecar: Uri | bool | None = None,
    raw: bool = False,
    config: Config | None = None,
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a checkpoint by their names on disk, or some of them.

    A name that the checkpoint leaves out because the model ties it (``lm_head.weight`` to the embedding) is there too,
    as the very same tensor. Memory is as for ``load_file``.

    Args:
        uri: A file, a Hugging Face folder, an index, or a URI of any storage.
        device: Where to, as torch takes it: a name, a ``torch.device`` or the index of a CUDA device; ``cpu`` by
            default, or the arena's.
        include: Globs on names (``"model.layers.0.*"``); only matching tensors are read.
        arena: Memory to use again instead of fresh memory.
        sidecar: Recorded checksums: None uses those beside the checkpoint, a path others, False none.
        raw: Give dtypes that torch lacks (F6) as packed ``uint8``, the last dim in bytes.
        config: Settings; by default those of the environment.

    Raises:
        RequestError: There is no checkpoint, a glob matches nothing, a list has no glob, torch lacks a dtype and
            ``raw`` is off, or the arena is on another device.
        CapacityError: The arena has no room, or this process may not have as much memory.
        IntegrityError: A file is damaged, changed, or does not match its sidecar.
        SourceError: The storage does not answer.
    """
    require_config(config)
    require_arena(arena)
    globs = require_globs(include)
    settings = config if config is not None else load_config()
    manifest = inspect(uri, sidecar=sidecar, config=settings)
    names = _included(manifest, globs)
    infos: dict[str, TensorInfo] = {}
    for name in names:
        present = manifest.tied.get(name, name)
        infos[present] = manifest.tensors[present]
    tensors = _load(manifest, list(infos.values()), device, settings, arena, raw=raw)
    return {name: tensors[manifest.tied.get(name, name)] for name in names}


def load_into(
    module: torch.nn.Module,
    uri: Uri,
    *,
    strict: bool = True,
    device: Device | None = None,
    sidecar: Uri | bool | None = None,
    config: Config | None = None,
) -> ModuleLoad:
    """Fills a module's parameters and persistent buffers from a checkpoint, in place.

    - Names on disk are mapped to the module's where ``config.json`` names a known family: experts that are one tensor
      each on disk land in the fused parameter. A name that is the same on disk needs no mapping.
    - A contiguous parameter with the checkpoint's dtype is read into place; another one is converted, as
      ``copy_`` does.
    - A ``DTensor`` parameter gets its own shard, and only the bytes of that are read.
    - A parameter on the meta device is replaced by a new one with the checkpoint's dtype, as ``assign=True`` of
      ``load_state_dict`` does.

    Names, shapes and placements are all checked before the first byte is written. Storage that fails after that
    leaves parameters that were not on the meta device with a mixture of old and new values: load again.

    Args:
        module: What to fill.
        uri: As for ``load_state_dict``.
        strict: Refuse a checkpoint that lacks tensors of the module or has others.
        device: Where parameters on the meta device go; ``cpu`` by default, the mesh's device for ``DTensor``.
        sidecar: Recorded checksums: None uses those beside the checkpoint, a path others, False none.
        config: Settings; by default those of the environment.

    Returns:
        What was loaded, missing and unexpected.

    Raises:
        RequestError: Names are missing or unexpected (``strict``), or shapes differ; the message lists them.
        CapacityError: There is no memory for parameters on the meta device; nothing was written.
        IntegrityError: A file is damaged, changed, or does not match its sidecar.
        SourceError: The storage does not answer.
    """
    from megamind_ray.engine.module_load import load_module

    module = require_module(module, uri)
    require_config(config)
    settings = config if config is not None else load_config()
    return load_module(module, inspect(uri, sidecar=sidecar, config=settings), settings, strict=strict, device=device)


def _load(
    manifest: Manifest,
    infos: list[TensorInfo],
    device: Device | None,
    config: Config,
    arena: Arena | None,
    *,
    raw: bool = False,
) -> dict[str, torch.Tensor]:
    if arena is None:
        return load_tensors(manifest, infos, "cpu" if device is None else device, config, raw=raw).tensors
    arena.require_device(device)
    return load_tensors(manifest, infos, arena.device, config, arena=memory_of(arena), raw=raw).tensors


def _names_file(path: Uri, manifest: Manifest) -> bool:
    """Whether the one file of the manifest is what the path names, rather than the content of a folder."""
    return parse_location(path).uri == manifest.file_uri(0)


def _included(manifest: Manifest, globs: Sequence[str] | None) -> list[str]:
    names = [*manifest.tensors, *manifest.tied]
    if globs is None:
        return names
    chosen: dict[str, None] = {}
    for glob in globs:
        matching = [name for name in names if fnmatch.fnmatchcase(name, glob)]
        if not matching:
            raise RequestError(
                f"include={glob!r} matches no tensor of {manifest.uri}; 'megamind inspect' lists the names"
            )
        chosen.update(dict.fromkeys(matching))
    return [name for name in names if name in chosen]
