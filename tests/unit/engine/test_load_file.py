from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as reference_load_file
from safetensors.torch import save_file

import megamind_ray as mm
from megamind_ray.config import Config, IoConfig
from megamind_ray.core.tensor import DType
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.io import open_manifest

WriteRaw = Callable[..., Path]
TORCH_DTYPES = [dtype for dtype in DType if not dtype.label.startswith("F6_")]


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=lambda dtype: dtype.label)
def test_every_dtype_equals_what_the_safetensors_library_gives(
    dtype: DType, tmp_path: Path, write_raw: WriteRaw
) -> None:
    nbytes = 4 * 6 * dtype.bits // 8
    content = bytes([0, 1] * (nbytes // 2)) if dtype is DType.BOOL else os.urandom(nbytes)
    tensors = {"matrix": (dtype.label, [4, 6], content), "empty": (dtype.label, [0, 6], b"")}
    if dtype is not DType.F4:
        tensors["scalar"] = (dtype.label, [], content[: dtype.bits // 8])
    path = write_raw(tmp_path / "all.safetensors", tensors)

    loaded, expected = mm.load_file(path), reference_load_file(path)

    assert loaded.keys() == expected.keys()
    assert all(_bits(loaded[name]) == _bits(tensor) for name, tensor in expected.items())


def test_saving_one_tensor_writes_the_bytes_of_that_tensor(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    save_file({"small": torch.arange(8.0), "large": torch.zeros(1 << 20)}, path)

    small = mm.load_file(path)["small"]
    saved = io.BytesIO()
    torch.save(small, saved)

    assert small.untyped_storage().nbytes() == 32
    assert len(saved.getvalue()) < 4096


def test_tensors_are_writable_and_the_file_stays_as_it_is(llama: Any) -> None:
    before = llama.file.read_bytes()

    tensors = mm.load_file(llama.file)
    for tensor in tensors.values():
        tensor.zero_()

    assert llama.file.read_bytes() == before
    again = mm.load_file(llama.file)
    assert all(torch.equal(again[name], tensor) for name, tensor in llama.tensors.items())


def test_tensors_stay_when_the_file_is_overwritten_or_removed(llama: Any, tmp_path: Path) -> None:
    path = Path(shutil.copy(llama.file, tmp_path))
    tensors = mm.load_file(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    path.unlink()

    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.tensors.items())


def test_one_tensor_may_outlive_all_others(llama: Any) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    kept = mm.load_file(llama.file)[name]

    assert torch.equal(kept, llama.tensors[name])


def test_tensors_at_odd_offsets_are_aligned_in_memory(tmp_path: Path, write_raw: WriteRaw) -> None:
    path = write_raw(
        tmp_path / "odd.safetensors",
        {"byte": ("U8", [3], b"abc"), "float": ("F32", [3], os.urandom(12)), "long": ("I64", [2], os.urandom(16))},
        pad=1,
    )

    loaded, expected = mm.load_file(path), reference_load_file(path)

    assert all(_bits(loaded[name]) == _bits(tensor) for name, tensor in expected.items())
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in loaded.values())


@pytest.mark.parametrize("read_threads", [1, 5])
def test_many_chunks_and_threads_give_the_same_bytes(llama: Any, read_threads: int) -> None:
    config = Config(io=IoConfig(chunk_bytes=64 << 10, extent_bytes=64 << 10, read_threads=read_threads))
    manifest = open_manifest(llama.file)

    loaded = load_tensors(manifest, list(manifest.tensors.values()), "cpu", config)

    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in llama.tensors.items())
    assert loaded.summary.totals.payload_bytes == llama.nbytes


def test_with_a_sidecar_every_chunk_is_verified(
    llama: Any, tmp_path: Path, record: Callable[[Path], Any], config: Config, storage: Any
) -> None:
    manifest = record(Path(shutil.copy(llama.file, tmp_path)))
    storage.flip_at, storage.flips_left = manifest.files[0].data_begin + 70_000, 1

    loaded = load_tensors(manifest, list(manifest.tensors.values()), "cpu", config, opener=storage)

    assert loaded.summary.verified == "reference"
    assert [fault.kind for fault in loaded.summary.faults] == ["chunk_mismatch"]
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in llama.tensors.items())


def test_a_change_of_the_file_that_shows_late_is_found_at_the_end(
    llama: Any, tmp_path: Path, config: Config, storage: Any
) -> None:
    path = Path(shutil.copy(llama.file, tmp_path))
    manifest = open_manifest(path)
    infos = list(manifest.tensors.values())
    config = replace(config, io=replace(config.io, read_threads=1))
    load_tensors(manifest, infos, "cpu", config, opener=storage)
    storage.num_checks, storage.stale_checks = 0, storage.num_checks - 1
    storage.before_read = lambda _offset: os.utime(path, ns=(1, 1))

    with pytest.raises(mm.IntegrityError, match="changed while it was read"):
        load_tensors(manifest, infos, "cpu", config, opener=storage)


def test_a_flipped_bit_on_disk_is_found(llama: Any, tmp_path: Path, record: Callable[[Path], Any]) -> None:
    path = Path(shutil.copy(llama.file, tmp_path))
    record(path)
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-10, os.SEEK_END)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(mm.IntegrityError, match=r"model\.safetensors: bytes \[.*recorded in .*megamind\.json"):
        mm.load_file(path)


def test_f6_is_refused_by_name(tmp_path: Path, write_raw: WriteRaw) -> None:
    path = write_raw(tmp_path / "f6.safetensors", {"w": ("F6_E2M3", [4], b"abc")})

    with pytest.raises(mm.RequestError, match="tensor 'w': torch .* has no dtype for F6_E2M3"):
        mm.load_file(path)


def test_f6_comes_as_bytes_where_asked_for(tmp_path: Path, write_raw: WriteRaw) -> None:
    path = write_raw(tmp_path / "f6.safetensors", {"w": ("F6_E2M3", [2, 4], b"abcdef")})

    tensor = mm.load_state_dict(path, raw=True)["w"]

    assert tensor.dtype == torch.uint8
    assert bytes(tensor.flatten().tolist()) == b"abcdef"
    assert tensor.shape == (2, 3)


def test_a_folder_is_not_a_file(llama: Any) -> None:
    with pytest.raises(mm.RequestError, match="is not one safetensors file; load folders with load_state_dict"):
        mm.load_file(llama.path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(mm.RequestError, match=r"nothing\.safetensors"):
        mm.load_file(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(llama: Any, device: str) -> None:
    with pytest.raises(mm.RequestError, match=f"device '{device}'"):
        mm.load_file(llama.file, device=device)


def test_an_empty_checkpoint_gives_an_empty_dict(tmp_path: Path, write_raw: WriteRaw) -> None:
    assert mm.load_file(write_raw(tmp_path / "none.safetensors", {})) == {}
