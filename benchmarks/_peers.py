"""Other loaders, each as its documentation shows it, with its own defaults, and asked for memory of its own.

Into fresh memory: what a peer returns as a mapping of the file is cloned, since owned memory is compared with owned
memory; ``safetensors (mapped)`` shows what that costs. Into memory that was used before: the best that a peer's public
interface offers for a state dict that exists already; the comment at each says what that is.

None of these is needed to use megamind-ray: they are imported where they are measured.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from benchmarks._checkpoint import Checkpoint
from benchmarks._contenders import Contender, Load, Recycled, Tensors, UnavailableError

__all__ = ["PEERS", "versions"]

_PACKAGES = ("safetensors", "fastsafetensors", "runai-model-streamer", "torch", "accelerate", "transformers")
_PAGE_BYTES = 4096


def versions() -> dict[str, str | None]:
    """Releases of the peers' packages; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _safetensors(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """Mapped files. Fresh: every tensor cloned. Recycled: every tensor copied from the mapping to its place."""
    safetensors, load_file = importlib.import_module("safetensors"), _safetensors_load_file()

    def fresh() -> Tensors:
        tensors: dict[str, torch.Tensor] = {}
        for path in checkpoint.files:
            tensors.update({name: tensor.clone() for name, tensor in load_file(path).items()})
        return tensors

    def copied(places: Tensors) -> Tensors:
        for path in checkpoint.files:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    places[name].copy_(file.get_tensor(name))
        return places

    return fresh if recycled is None else lambda: copied(recycled.tensors)


def _safetensors_mapped(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """As ``load_file`` returns it, every page touched: page-cache memory, not owned."""
    load_file = _safetensors_load_file()
    if recycled is not None:
        raise UnavailableError("a mapping is never memory that was used before")

    def load() -> Tensors:
        tensors: dict[str, torch.Tensor] = {}
        for path in checkpoint.files:
            tensors.update(load_file(path))
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
        return tensors

    return load


def _safetensors_pread(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """Its ``pread`` back end. Recycled: tensor by tensor, read and copied; it has no call that reads into a tensor."""
    safetensors, load_file = importlib.import_module("safetensors"), _safetensors_load_file()
    try:
        safetensors.safe_open(checkpoint.files[0], framework="pt", backend="pread")
    except TypeError as error:
        raise UnavailableError("this release has the mapping back end alone") from error

    def fresh() -> Tensors:
        tensors: dict[str, torch.Tensor] = {}
        for path in checkpoint.files:
            tensors.update(load_file(path, backend="pread"))
        return tensors

    def copied(places: Tensors) -> Tensors:
        for path in checkpoint.files:
            with safetensors.safe_open(path, framework="pt", backend="pread") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    places[name].copy_(file.get_tensor(name))
        return places

    return fresh if recycled is None else lambda: copied(recycled.tensors)


def _safetensors_load_file() -> Callable[..., dict[str, torch.Tensor]]:
    load_file: Callable[..., dict[str, torch.Tensor]] = importlib.import_module("safetensors.torch").load_file
    return load_file


def _fastsafetensors(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """Without GPU direct storage. Its tensors own their file's buffer.

    Recycled: file by file, each tensor copied to its place from a buffer that is then given back; it has no call that
    reads into a tensor.
    """
    loader_class = importlib.import_module("fastsafetensors").SafeTensorsFileLoader

    def fresh() -> Tensors:
        return _fastsafetensors_load(loader_class, [str(path) for path in checkpoint.files], dict)

    def copied(places: Tensors) -> Tensors:
        for path in checkpoint.files:
            _fastsafetensors_load(loader_class, [str(path)], lambda loaded: _copy(loaded, places))
        return places

    return fresh if recycled is None else lambda: copied(recycled.tensors)


def _fastsafetensors_load(loader_class: Any, paths: list[str], take: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    loader = loader_class(None, device="cpu", nogds=True)
    try:
        loader.add_filenames({0: paths})
        buffers = loader.copy_files_to_device()
        try:
            return take({name: buffers.get_tensor(name) for name in loader.get_keys()})
        finally:
            buffers.close()
    finally:
        loader.close()


def _copy(tensors: dict[str, torch.Tensor], places: Tensors) -> None:
    for name, tensor in tensors.items():
        places[name].copy_(tensor)


def _runai_streamer(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """Run:ai model streamer. Fresh: it gives the tensors away (``owned=True``, its default).

    Recycled: views of the buffers that it reuses (``owned=False``), copied to their place as they come. Releases
    without that choice reuse them always, and so their tensors are cloned for fresh memory.
    """
    paths = [str(path) for path in checkpoint.files]
    if recycled is None:
        return lambda: _runai_fresh([paths])
    streamer_class, can_own = _runai()

    def copied() -> Tensors:
        with streamer_class() as streamer:
            streamer.stream_files(paths, **({"owned": False} if can_own else {}))
            for name, tensor in streamer.get_tensors():
                recycled.tensors[name].copy_(tensor)
        return recycled.tensors

    return copied


def _runai_streamer_by_file(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """A call of its own for each file, as ``load_file`` is called: what overlapping the files is worth to it."""
    if recycled is not None:
        raise UnavailableError("of interest where the disk is the limit")
    return lambda: _runai_fresh([[str(path)] for path in checkpoint.files])


def _runai_fresh(calls: list[list[str]]) -> Tensors:
    streamer_class, can_own = _runai()
    tensors: dict[str, torch.Tensor] = {}
    for paths in calls:
        with streamer_class() as streamer:
            streamer.stream_files(paths)
            tensors.update({name: tensor if can_own else tensor.clone() for name, tensor in streamer.get_tensors()})
    return tensors


def _runai() -> tuple[Any, bool]:
    """Its streamer, and whether it can give tensors away."""
    streamer_class = importlib.import_module("runai_model_streamer").SafetensorsStreamer
    return streamer_class, "owned" in streamer_class.stream_files.__code__.co_varnames


def _torch_dcp(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """torch.distributed.checkpoint without a process group: always loads into a state dict that exists.

    Fresh: into empty tensors, made on the clock. Recycled: its native case. Two reader threads, as the machine that
    this was written on has two cores; its default of one was slower.
    """
    dcp = importlib.import_module("torch.distributed.checkpoint")
    reader_class = importlib.import_module("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageReader

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def load() -> Tensors:
        if recycled is None:
            places = {place.name: torch.empty(place.shape, dtype=place.dtype) for place in checkpoint.places}
        else:
            places = dict(recycled.tensors)
        reader = reader_class(str(checkpoint.folder), thread_count=2)
        dcp.load(places, storage_reader=reader, no_dist=True)
        return places

    return load


def _accelerate(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """``load_checkpoint_in_model``. Fresh: into a module on the meta device, made off the clock; what it puts there
    are mappings of the files, so the parameters are cloned.

    Recycled: without a device map it copies into the parameters that the module has.
    """
    accelerate = importlib.import_module("accelerate")
    module = _meta_module(checkpoint)
    folder = str(checkpoint.folder)

    def fresh() -> Tensors:
        accelerate.load_checkpoint_in_model(module, folder, device_map={"": "cpu"})
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def copied() -> Tensors:
        accelerate.load_checkpoint_in_model(module, folder)
        return module.state_dict()

    if recycled is None:
        return fresh
    _put_into(module, recycled)
    return copied


def _transformers(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    """``from_pretrained``. Fresh: its parameters are mappings of the files, so they are cloned.

    Recycled: ``load_sharded_checkpoint`` into a module that has its parameters.
    """
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    folder = str(checkpoint.folder)
    if recycled is None:

        def fresh() -> Tensors:
            module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            return {name: tensor.clone() for name, tensor in module.state_dict().items()}

        return fresh

    load_sharded = importlib.import_module("transformers.trainer_utils").load_sharded_checkpoint
    module = _meta_module(checkpoint)
    _put_into(module, recycled)

    def copied() -> Tensors:
        load_sharded(module, folder, strict=False)  # the tied output weights are not in the files
        return module.state_dict()

    return copied


def _meta_module(checkpoint: Checkpoint) -> torch.nn.Module:
    transformers, accelerate = importlib.import_module("transformers"), importlib.import_module("accelerate")
    config = transformers.AutoConfig.from_pretrained(str(checkpoint.folder))
    with accelerate.init_empty_weights(include_buffers=False):
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.tie_weights()
    return module


def _put_into(module: Any, recycled: Recycled) -> None:
    module.load_state_dict(recycled.tensors, strict=False, assign=True)
    module.tie_weights()


PEERS = (
    Contender(name="safetensors", kind="peer", prepare=_safetensors),
    Contender(name="safetensors (pread)", kind="peer", prepare=_safetensors_pread),
    Contender(name="fastsafetensors", kind="peer", prepare=_fastsafetensors),
    Contender(name="Run:ai streamer", kind="peer", prepare=_runai_streamer),
    Contender(name="torch DCP", kind="peer", prepare=_torch_dcp),
    Contender(name="accelerate", kind="peer", prepare=_accelerate),
    Contender(name="transformers", kind="peer", prepare=_transformers),
    Contender(name="Run:ai streamer, a call a file", kind="note", prepare=_runai_streamer_by_file),
    Contender(name="safetensors (mapped)", kind="note", prepare=_safetensors_mapped),
)
