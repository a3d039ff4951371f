"""A file that changes after the plan was made: nothing of it is handed out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megamind_ray as mm
from megamind_ray.config import Config
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.errors import IntegrityError
from megamind_ray.io import open_manifest, record_checksums, verify_checksums
from megamind_ray.testing.handmade import LLAMA_SHAPES, write_weights


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path: Path) -> None:
    write_weights(path.with_name("new"), {**LLAMA_SHAPES, "another": (1,)}).replace(path)


each_change = pytest.mark.parametrize(
    ("change", "names"),
    [
        (grow, "size in bytes"),
        (shrink, "size in bytes"),
        (touch, "mtime in ns"),
        (replace, "size in bytes"),
    ],
    ids=["longer", "shorter", "only its mtime", "another file in its place"],
)
Change = Callable[[Path], None]


@each_change
def test_a_whole_plan_in_one_process_frees_every_arena(llama: Path, change: Change, names: str) -> None:
    manifest, parallel = open_manifest(llama), mm.Parallel(tp=2)
    plan = mm.plan(llama, parallel)
    arenas = [HostArena(1 << 20) for _ in parallel.ranks]
    change(llama / "model.safetensors")

    with pytest.raises(IntegrityError, match=rf"model\.safetensors: changed since it was planned \({names}"):
        load_plan(plan, manifest, Config(), arenas)

    assert [arena.free_bytes for arena in arenas] == [1 << 20] * 2


@each_change
def test_local_tensors_are_not_handed_out(llama: Path, change: Change, names: str) -> None:
    manifest = open_manifest(llama)
    change(llama / "model.safetensors")

    with pytest.raises(IntegrityError, match=names):
        load_tensors(manifest, list(manifest.tensors.values()), "cpu", Config())


@each_change
def test_checksums_are_not_recorded(llama: Path, change: Change, names: str) -> None:
    manifest = open_manifest(llama)
    change(llama / "model.safetensors")

    with pytest.raises(IntegrityError, match=names):
        record_checksums(manifest)


def test_a_file_that_is_gone_is_named(llama: Path) -> None:
    manifest = open_manifest(llama)
    (llama / "model.safetensors").unlink()

    with pytest.raises(mm.RequestError, match=r"model\.safetensors: no such file"):
        load_tensors(manifest, list(manifest.tensors.values()), "cpu", Config())


def test_a_module_keeps_its_old_values_when_the_file_is_damaged(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", {"weight": (4, 4)})
    shrink(tmp_path / "model.safetensors")
    module = torch.nn.Linear(4, 4, bias=False)
    before = module.weight.detach().clone()

    with pytest.raises(IntegrityError):
        mm.load_into(module, tmp_path)

    assert torch.equal(module.weight, before)


def test_a_check_of_recorded_checksums_notices_the_change_too(llama: Path) -> None:
    from megamind_ray.io import default_sidecar_path, write_sidecar

    manifest = open_manifest(llama)
    write_sidecar(record_checksums(manifest), default_sidecar_path(manifest))
    manifest = open_manifest(llama)
    touch(llama / "model.safetensors")

    with pytest.raises(IntegrityError, match="mtime in ns was"):
        verify_checksums(manifest)
