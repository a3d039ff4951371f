"""The Hugging Face cache: ``models--ORG--NAME/snapshots/REVISION/FILE`` are links to ``../../blobs/HASH``."""

from pathlib import Path
from typing import Any

import pytest

from megamind_ray.errors import RequestError
from megamind_ray.io import open_manifest

OLD, NEW = "0a1b2c", "f00d42"


@pytest.fixture
def model(tmp_path: Path, encode: Any) -> Path:
    """A model with two snapshots, of which refs/main names the second."""
    folder = tmp_path / "hub" / "models--org--name"
    for revision, tensor in ((OLD, "old"), (NEW, "new")):
        blob = folder / "blobs" / f"hash-of-{tensor}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(encode({tensor: ("U8", [3], b"abc")}))
        link = folder / "snapshots" / revision / "model.safetensors"
        link.parent.mkdir(parents=True)
        link.symlink_to(f"../../blobs/{blob.name}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    return folder


def test_the_folder_of_a_model_is_the_snapshot_of_its_main_branch(model: Path) -> None:
    manifest = open_manifest(model)

    assert list(manifest.tensors) == ["new"]
    assert manifest.root == f"{model}/snapshots/{NEW}"


def test_the_folder_of_a_snapshot_is_that_snapshot(model: Path) -> None:
    assert list(open_manifest(model / "snapshots" / OLD).tensors) == ["old"]


def test_a_model_without_its_main_branch_names_the_snapshots(model: Path) -> None:
    (model / "refs" / "main").unlink()

    with pytest.raises(RequestError, match=rf"has no refs/main; give the folder of one snapshot \({OLD}, {NEW}\)"):
        open_manifest(model)


@pytest.mark.parametrize("revision", ["gone", "../blobs", ""])
def test_a_main_branch_that_names_no_snapshot(model: Path, revision: str) -> None:
    (model / "refs" / "main").write_text(revision)

    with pytest.raises(RequestError, match=f"refs/main names the snapshot '{revision}', which is not there"):
        open_manifest(model)


def test_an_ordinary_folder_of_such_a_name_is_read_as_one(tmp_path: Path, encode: Any) -> None:
    folder = tmp_path / "models--mine"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(encode({"w": ("U8", [3], b"abc")}))

    assert list(open_manifest(folder).tensors) == ["w"]


def test_a_snapshot_whose_blobs_were_removed_is_not_a_smaller_checkpoint(model: Path, encode: Any) -> None:
    snapshot = model / "snapshots" / NEW
    (snapshot / "more.safetensors").symlink_to("../../blobs/hash-of-more")

    with pytest.raises(
        RequestError, match=r"more.safetensors: is a link to ../../blobs/hash-of-more, which is not there .*fetch"
    ):
        open_manifest(model)


def test_a_file_of_an_index_whose_blob_was_removed_is_named_as_a_link(model: Path) -> None:
    snapshot = model / "snapshots" / NEW
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"new": "model.safetensors"}}')
    (model / "blobs" / "hash-of-new").unlink()

    with pytest.raises(RequestError, match="model.safetensors: is a link to ../../blobs/hash-of-new, which is not"):
        open_manifest(model)
