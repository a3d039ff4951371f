"""Folders without an index whose file names say how many there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megamind_ray.errors import IntegrityError, RequestError
from megamind_ray.io import open_manifest


def folder_of(path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        save_file({f"t{number}": np.ones(4, np.float32)}, path / name)
    return path


@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"),
        ("a-1-of-1.safetensors", "b-1-of-1.safetensors"),
        ("model.safetensors", "other.safetensors"),
        ("model-00001-of-00001.safetensors", "extra.safetensors"),
        ("2-of-hearts.safetensors",),
        ("run-3-of-20251231.safetensors",),
    ],
)
def test_what_is_complete_is_opened(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert len(open_manifest(folder_of(tmp_path, *names)).files) == len(names)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"), "model-00002-of-00003.safetensors"),
        (("model-00002-of-00002.safetensors",), "model-00001-of-00002.safetensors"),
        (("model-00000-of-00003.safetensors", "model-00002-of-00003.safetensors"), "model-00001-of-00003.safetensors"),
        (("w_1_of_2.safetensors", "z.safetensors"), "w_2_of_2.safetensors"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, names: tuple[str, ...], missing: str) -> None:
    with pytest.raises(RequestError, match=rf"not there: {missing}; fetch the checkpoint again$"):
        open_manifest(folder_of(tmp_path, *names))


@pytest.mark.parametrize("left", ["model-00002-of-00002.safetensors.incomplete", "x.part", "x.lock"])
def test_a_download_that_is_not_done_is_told(tmp_path: Path, left: str) -> None:
    (folder_of(tmp_path, "model-00001-of-00002.safetensors") / left).touch()

    with pytest.raises(RequestError, match=f"not there: .*download seems to be under way or broken off .{left}"):
        open_manifest(tmp_path)


def test_one_part_may_be_opened_by_its_own_name(tmp_path: Path) -> None:
    folder_of(tmp_path, "model-00001-of-00002.safetensors")

    assert len(open_manifest(tmp_path / "model-00001-of-00002.safetensors").tensors) == 1


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n\n<html><body>", "a web page"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00", "weights_only=True"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "weights_only=True"),
        (b'{"error": "not authorised"}', "JSON from its first byte"),
        (b"GGUF\x03\x00\x00\x00\x00", "a GGUF file"),
        (b"\x1f\x8b\x08\x00\x12\x34\x56\x78\x00", "gunzip"),
    ],
)
def test_a_file_of_another_kind_is_told_for_what_it_is(tmp_path: Path, begin: bytes, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(begin)

    with pytest.raises(IntegrityError, match=f"model.safetensors: no safetensors file: it .*{what}"):
        open_manifest(tmp_path)
