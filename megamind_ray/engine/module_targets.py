"""Which bytes of a checkpoint each tensor of a module needs, and whether they fit; nothing is read or written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.device.dtypes import torch_dtype, torch_layout
from megamind_ray.engine.slice_reads import SliceRows
from megamind_ray.errors import RequestError, listed
from megamind_ray.planning.geometry import Box, box_rows
from megamind_ray.planning.naming import module_entries

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

__all__ = ["Match", "Origin", "Target", "is_distributed", "match_module", "slices_of"]

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor on disk that is a part of a module tensor.

    Attributes:
        info: The tensor on disk.
        shape: Its shape, seen with as many dims as the module tensor.
        corner: Where its first element is in the module tensor.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    corner: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """A module tensor as the checkpoint has it.

    Attributes:
        dtype: Element type.
        shape: Global shape.
        parts: What it is assembled from; they tile it.
    """

    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tensor of the module with bytes to fill.

    Attributes:
        names: All names that it has in the module.
        tensor: The parameter or buffer; a ``DTensor`` where it is sharded.
        local: What this process holds of it.
        box: Which part of the global tensor that is.
        origin: Where its bytes are.
        dtype: The checkpoint's dtype, as torch has it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    local: torch.Tensor
    box: Box
    origin: Origin
    dtype: torch.dtype

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return bool(self.local.is_meta)

    @property
    def in_place(self) -> bool:
        """Whether stored bytes can be read straight into it."""
        return not self.is_meta and self.local.dtype == self.dtype and self.local.is_contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How a module and a checkpoint fit together.

    Attributes:
        targets: What to fill.
        missing: Names of the module that the checkpoint lacks.
        unexpected: Names on disk that the module has no place for.
    """

    targets: tuple[Target, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_module(module: torch.nn.Module, manifest: Manifest) -> Match:
    """Matches a module's parameters and persistent buffers with a checkpoint.

    Raises:
        RequestError: A shape differs, or a sharding is not supported; the message lists all such tensors.
    """
    origins = _origins(manifest)
    targets: list[Target] = []
    missing: list[str] = []
    problems: list[str] = []
    used: set[str] = set()
    for names, tensor in _state(module):
        name = next((name for name in names if name in origins), None)
        if name is None:
            missing.extend(names)
            continue
        origin = origins[name]
        # A module that ties its names takes either of a checkpoint that has both.
        used.update(part.info.name for known in names if known in origins for part in origins[known].parts)
        try:
            targets.append(_target(names, tensor, origin))
        except RequestError as error:
            problems.append(str(error))
    if problems:
        raise RequestError(f"{manifest.uri} does not fit the module: {listed(problems, _MAX_LISTED, '; ')}")
    # Buffers that the module makes itself, such as position ids, are in checkpoints of older releases.
    own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unexpected = tuple(name for name in manifest.tensors if name not in used and name not in own)
    return Match(targets=tuple(targets), missing=tuple(missing), unexpected=unexpected)


def slices_of(target: Target, number: int) -> list[SliceRows]:
    """The stored bytes of a target, for destination ``number``, which is laid out as the target's local tensor."""
    local_shape = tuple(stop - start for start, stop in target.box)
    pieces = []
    for part in target.origin.parts:
        overlap = [
            (max(start, at), min(stop, at + size))
            for (start, stop), at, size in zip(target.box, part.corner, part.shape, strict=True)
        ]
        if any(start >= stop for start, stop in overlap):
            continue
        rows = box_rows(
            part.shape,
            part.info.dtype.bits,
            part.info.begin,
            [(start - at, stop - at) for (start, stop), at in zip(overlap, part.corner, strict=True)],
            dst_shape=local_shape,
            dst_corner=[start - first for (start, _), (first, _) in zip(overlap, target.box, strict=True)],
            what=target.names[0],
        )
        pieces.append(SliceRows(part.info.file, number, rows))
    return pieces


def _origins(manifest: Manifest) -> dict[str, Origin]:
    """By name in the module, and by name on disk: a module may keep its experts apart, as the checkpoint does."""
    origins: dict[str, Origin] = {}
    for info in manifest.tensors.values():
        origins[info.name] = Origin(info.dtype, info.shape, (Part(info, info.shape, (0,) * len(info.shape)),))
    for absent, present in manifest.tied.items():
        origins[absent] = origins[present]
    infos = list(manifest.tensors.values())
    for entry in module_entries(manifest):
        if not entry.fused:
            origin = origins[infos[int(entry.parts[0][0])].name]
        else:
            origin = Origin(entry.dtype, entry.shape, _expert_parts(entry.parts, infos))
        origins.update(dict.fromkeys(entry.names, origin))
    return origins


def _expert_parts(groups: tuple[np.ndarray[Any, np.dtype[np.int64]], ...], infos: list[TensorInfo]) -> tuple[Part, ...]:
    parts = []
    for group, indices in enumerate(groups):
        for expert, index in enumerate(indices.tolist()):
            info = infos[index]
            rows, *rest = info.shape
            parts.append(Part(info, (1, rows, *rest), (expert, group * rows, *(0 for _ in rest))))
    return tuple(parts)


def _state(module: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Parameters and persistent buffers, each once, with all their names."""
    import torch

    names: dict[object, list[str]] = {}
    tensors: dict[object, torch.Tensor] = {}
    state: Mapping[str, object] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):  # extra state of a module may be anything
            key = _identity(value)
            names.setdefault(key, []).append(name)
            tensors.setdefault(key, value)
    return [(tuple(names[key]), tensors[key]) for key in tensors]


def _identity(tensor: torch.Tensor) -> object:
    """The same for what is one tensor: one object, or two that see the same memory alike (``b.data = a.data``).

    Read into side by side, such memory would end as a mixture of what the checkpoint has for both names.
    """
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or not tensor.data_ptr():  # other types may have no memory to tell them by
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _target(names: tuple[str, ...], tensor: torch.Tensor, origin: Origin) -> Target:
    dtype, shape = torch_layout(names[0], origin.dtype, origin.shape, raw=True)
    if tuple(tensor.shape) != shape:
        raise RequestError(f"{names[0]} is {list(tensor.shape)} in the module and {list(shape)} in the checkpoint")
    _require_convertible(names[0], origin.dtype, dtype, tensor)
    local, box = _local_part(names[0], tensor)
    if any(size > 1 and step == 0 for size, step in zip(local.shape, local.stride(), strict=True)):
        raise RequestError(
            f"{names[0]} is an expanded view in the module, several of its elements are one in memory; give the module "
            "its clone()"
        )
    if shape != origin.shape:
        # Packed elements: torch counts bytes or pairs where the checkpoint counts elements.
        box = _unpacked(names[0], box, shape, origin.shape)
    return Target(names=names, tensor=tensor, local=local, box=box, origin=origin, dtype=dtype)


def _require_convertible(name: str, stored: DType, dtype: torch.dtype, tensor: torch.Tensor) -> None:
    """Refuses conversions that would make other numbers of the stored ones, or that torch does not have."""
    if tensor.dtype == dtype:
        return
    if torch_dtype(stored) is None or (stored is DType.F4 and not tensor.is_meta):
        raise RequestError(
            f"{name} is {stored.label} in the checkpoint, which torch cannot convert to the module's {tensor.dtype}; "
            f"give the module {dtype} there, for its packed bytes"
        )
    if dtype.is_complex and not tensor.dtype.is_complex and not tensor.is_meta:
        raise RequestError(f"{name} is complex in the checkpoint and {tensor.dtype} in the module; make it {dtype}")


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a ``DTensor``; builds of torch without distributed have none."""
    import torch

    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """What this process holds of a tensor, and where that is in the global one."""
    if not is_distributed(tensor):
        return tensor, tuple((0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise RequestError(f"{name} is a DTensor with placements {placements}; a partial sum cannot be loaded")
    local: torch.Tensor = tensor.to_local().detach()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise RequestError(
            f"{name} is a DTensor with placements {placements}, whose local shape is {list(local.shape)} and not "
            f"{list(shape)}; redistribute it to Shard or Replicate"
        )
    return local, tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _unpacked(name: str, box: Box, packed: tuple[int, ...], stored: tuple[int, ...]) -> Box:
    """The box in stored elements, for a tensor whose last dim torch counts in pairs or bytes."""
    if len(packed) != len(stored):
        if box != ((0, packed[0]),):
            raise RequestError(
                f"{name}: packed elements that fill no whole bytes a row cannot be sharded; replicate it"
            )
        return tuple((0, size) for size in stored)
    *front, (start, stop) = box
    return (*front, (start * stored[-1] // packed[-1], stop * stored[-1] // packed[-1]))
