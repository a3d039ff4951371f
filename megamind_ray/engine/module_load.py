"""Filling a module from a checkpoint: everything is checked first, then read to where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.empty import empty_tensor
from megamind_ray.engine.extent_reader import SourceOpener
from megamind_ray.engine.module_targets import Match, Target, is_distributed, match_module, slices_of
from megamind_ray.engine.sinks import TensorSink
from megamind_ray.engine.slice_reads import ReadSummary, read_slices, slice_table
from megamind_ray.engine.state_dict import check_device
from megamind_ray.errors import RequestError, listed

if TYPE_CHECKING:
    import torch

__all__ = ["ModuleLoad", "load_module"]

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoad:
    """What a load into a module did.

    Attributes:
        loaded: Names of the module that were filled.
        missing: Names of the module that the checkpoint lacks; they keep their values.
        unexpected: Names on disk that the module has no place for.
        still_meta: Parameters and buffers (the ones that no checkpoint has, too) that are still on the meta device.
        summary: What was read.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    still_meta: tuple[str, ...]
    summary: ReadSummary


def load_module(
    module: torch.nn.Module,
    manifest: Manifest,
    config: Config,
    *,
    strict: bool,
    device: str | int | torch.device | None = None,
    opener: SourceOpener | None = None,
) -> ModuleLoad:
    """Fills a module; see ``api.local.load_into``, which this is the engine of.

    Raises:
        RequestError: Names or shapes do not fit; nothing was written.
        CapacityError: There is no memory for what has none yet; nothing was written.
        IntegrityError, SourceError: Bytes are wrong, or cannot be read.
    """
    match = match_module(module, manifest)
    if strict:
        _require_all_names(match, manifest)
    meta_device = None if device is None else check_device(device)
    destinations = [_destination(target, meta_device) for target in match.targets]
    slices = slice_table([rows for number, target in enumerate(match.targets) for rows in slices_of(target, number)])
    gpu = next((tensor.device for tensor in destinations if tensor.device.type == "cuda"), None)
    summary = read_slices(
        manifest,
        slices,
        TensorSink(destinations),
        config,
        opener=opener,
        make_buffer=host_buffer if gpu is None else copy_engine(gpu).staging,
    )
    for target, tensor in zip(match.targets, destinations, strict=True):
        _place(module, target, tensor)
    return ModuleLoad(
        loaded=tuple(name for target in match.targets for name in target.names),
        missing=match.missing,
        unexpected=match.unexpected,
        still_meta=_still_meta(module),
        summary=summary,
    )


def _require_all_names(match: Match, manifest: Manifest) -> None:
    problems = []
    if match.missing:
        problems.append(f"the checkpoint lacks {listed(match.missing, _MAX_LISTED)}")
    if match.unexpected:
        problems.append(f"the module has no place for {listed(match.unexpected, _MAX_LISTED)}")
    if problems:
        raise RequestError(
            f"{manifest.uri} does not fit the module: {'; '.join(problems)}; "
            "take the checkpoint of this architecture, or strict=False to load what fits"
        )


def _destination(target: Target, meta_device: torch.device | None) -> torch.Tensor:
    """Where the stored bytes go: the tensor itself, or new memory with its local shape and the stored dtype."""
    import torch

    if target.in_place:
        return target.local
    device = target.local.device
    if target.is_meta:
        mesh = getattr(target.tensor, "device_mesh", None)
        device = meta_device or torch.device(mesh.device_type if mesh is not None else "cpu")
    elif device.type not in ("cpu", "cuda"):
        device = torch.device("cpu")
    return empty_tensor(target.local.shape, target.dtype, device)


def _place(module: torch.nn.Module, target: Target, data: torch.Tensor) -> None:
    import torch

    if target.in_place:
        return
    if not target.is_meta:
        with torch.no_grad():
            target.local.copy_(data)
        return
    value = _distributed_like(target.tensor, data)
    if isinstance(target.tensor, torch.nn.Parameter):
        trains = target.tensor.requires_grad and (value.is_floating_point() or value.is_complex())
        value = torch.nn.Parameter(value, requires_grad=trains)
    for name in target.names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        where = owner._parameters if leaf in owner._parameters else owner._buffers
        where[leaf] = value  # type: ignore[assignment]


def _distributed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not is_distributed(tensor):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _still_meta(module: torch.nn.Module) -> tuple[str, ...]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return tuple(name for name, tensor in named if tensor.is_meta)
