"""Requests that are refused: the error's class, and that its text names the culprit."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.errors import IntegrityError, RequestError
from megamind_ray.io import open_manifest

INDEX = "model.safetensors.index.json"


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere: no such file or folder; check the path"):
        open_manifest(tmp_path / "nowhere")


def test_a_path_through_a_file(write_file: Any) -> None:
    with pytest.raises(RequestError, match=r"w.safetensors/model: no such file or folder"):
        open_manifest(write_file("w.safetensors", {"w": 1}) / "model")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{tmp_path}: the folder is empty"):
        open_manifest(tmp_path)


def test_a_folder_of_folders_says_which(tmp_path: Path, write_file: Any) -> None:
    write_file("transformer/model.safetensors", {"w": 1})

    with pytest.raises(RequestError, match=r"no \.safetensors files directly in this folder .*transformer"):
        open_manifest(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_folder_with_only_pickle_files_says_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04pickle")
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(RequestError, match=rf"only pickle files \({name}\)") as caught:
        open_manifest(tmp_path)

    assert "save_file" in str(caught.value)
    assert f"torch.load('{name}'" in str(caught.value)


def test_a_pickle_file_given_directly(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x04pickle")

    with pytest.raises(RequestError, match=r"model.bin: only pickle files"):
        open_manifest(path)


def test_an_index_of_pickle_files(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "pytorch_model-00001.bin"}}))

    with pytest.raises(RequestError, match=r"only pickle files \(pytorch_model-00001.bin\)"):
        open_manifest(path)


@pytest.mark.parametrize("name", ["model.gguf", "config.json", "model.onnx"])
def test_a_file_of_another_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")

    with pytest.raises(RequestError, match=f"{name}: not a safetensors file"):
        open_manifest(tmp_path / name)


def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")

    with pytest.raises(RequestError, match=r"w.safetensors: neither a file nor a folder"):
        open_manifest(tmp_path / "w.safetensors")


def test_a_truncated_file(write_file: Any) -> None:
    path = write_file("w.safetensors", {"a": 100, "b": 100})
    os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(IntegrityError, match=r"w.safetensors: tensor 'b' .* runs past the end of the file"):
        open_manifest(path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").touch()

    with pytest.raises(IntegrityError, match=r"w.safetensors: has 0 bytes, too short"):
        open_manifest(tmp_path)


def test_the_damaged_one_of_several_files_is_named(indexed_folder: Path) -> None:
    path = indexed_folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:20])

    with pytest.raises(IntegrityError) as caught:
        open_manifest(indexed_folder)

    assert caught.value.file == str(path)


def test_one_name_in_two_files_without_an_index(tmp_path: Path, write_file: Any) -> None:
    write_file("fp16.safetensors", {"w": 2})
    write_file("fp32.safetensors", {"w": 4})

    with pytest.raises(
        RequestError, match=r"'w' is both in 'fp16.safetensors' and in 'fp32.safetensors'; give the path"
    ):
        open_manifest(tmp_path)


def test_one_name_in_two_files_of_an_index(tmp_path: Path, write_file: Any) -> None:
    write_file("one.safetensors", {"a": 1, "w": 2})
    write_file("two.safetensors", {"b": 1, "w": 2})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "w": "two.safetensors"})

    with pytest.raises(IntegrityError, match=r"'w' is both in 'one.safetensors' and in 'two.safetensors'") as caught:
        open_manifest(tmp_path)

    assert caught.value.tensor == "w"


def test_an_index_that_names_missing_files(indexed_folder: Path) -> None:
    (indexed_folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(RequestError, match=rf"{INDEX}: names 1 of 2 files .*: model-00002-of-00002.safetensors"):
        open_manifest(indexed_folder)


def test_an_index_that_names_a_missing_file_in_a_folder(tmp_path: Path) -> None:
    write_index(tmp_path, {"w": "parts/one.safetensors"})

    with pytest.raises(RequestError, match=rf"{INDEX}: names the file 'parts/one.safetensors', which is not there"):
        open_manifest(tmp_path)


def test_an_index_that_names_a_missing_tensor(indexed_folder: Path) -> None:
    index = json.loads((indexed_folder / INDEX).read_text())
    write_index(indexed_folder, index["weight_map"] | {"d": "model-00002-of-00002.safetensors"})

    with pytest.raises(IntegrityError, match=r"names tensor 'd' in 'model-00002-of-00002.safetensors', .* in no file"):
        open_manifest(indexed_folder)


def test_an_index_that_names_the_wrong_file_of_a_tensor(indexed_folder: Path) -> None:
    index = json.loads((indexed_folder / INDEX).read_text())
    write_index(indexed_folder, index["weight_map"] | {"a": "model-00002-of-00002.safetensors"})

    with pytest.raises(IntegrityError, match=r"'a' in 'model-00002.*', but it is in 'model-00001"):
        open_manifest(indexed_folder)


@pytest.mark.parametrize(
    "path",
    [
        "../x.safetensors",
        "sub/../../x.safetensors",
        "..",
        "/etc/x.safetensors",
        "",
        ".",
        "..\\x.safetensors",
        "sub\\x.safetensors",
        "s3://bucket/x.safetensors",
        "x.safetensors::memory:",
        "x\0.safetensors",
    ],
)
def test_an_index_that_leaves_the_folder(tmp_path: Path, write_file: Any, path: Any) -> None:
    write_file("x.safetensors", {"w": 1})
    (tmp_path / "model" / "sub").mkdir(parents=True)
    write_index(tmp_path / "model", {"w": path})

    with pytest.raises(RequestError) as caught:
        open_manifest(tmp_path / "model")

    assert f"{INDEX}: tensor 'w': the file {path!r} is not a path inside" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["w"]}', "no weight_map"),
        ('{"weight_map": {"w": 1}}', "tensor 'w': 1 is not the name of a file"),
        ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "'w' occurs twice"),
    ],
)
def test_a_malformed_index(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / INDEX).write_text(text)

    with pytest.raises(IntegrityError, match=problem) as caught:
        open_manifest(tmp_path)

    assert caught.value.file == str(tmp_path / INDEX)


def test_several_indexes_must_be_chosen_from(tmp_path: Path) -> None:
    for name in ("model.fp16", "model.fp32"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")

    with pytest.raises(RequestError, match=r"give the path of one: model.fp16.*, model.fp32"):
        open_manifest(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"a": \xff'])
def test_a_malformed_config(tmp_path: Path, write_file: Any, text: str) -> None:
    write_file("model.safetensors", {"w": 1})
    (tmp_path / "config.json").write_text(text, encoding="latin-1")

    with pytest.raises(RequestError, match=f"{tmp_path}/config.json: "):
        open_manifest(tmp_path)


def test_a_link_out_of_the_folder(tmp_path: Path, write_file: Any) -> None:
    target = write_file("elsewhere/w.safetensors", {"w": 1})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.safetensors").symlink_to(target)

    with pytest.raises(RequestError, match=rf"model/w.safetensors: is a link to {target}, outside its folder"):
        open_manifest(tmp_path / "model")


def test_a_folder_that_is_a_link_out_of_the_folder(tmp_path: Path, write_file: Any) -> None:
    write_file("elsewhere/w.safetensors", {"w": 1})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "elsewhere")
    write_index(tmp_path / "model", {"w": "sub/w.safetensors"})

    with pytest.raises(RequestError, match=r"model/sub/w.safetensors: is a link to .*elsewhere"):
        open_manifest(tmp_path / "model")


def test_a_link_inside_the_folder_is_followed(tmp_path: Path, write_file: Any) -> None:
    write_file("data/w.safetensors", {"w": 1})
    (tmp_path / "w.safetensors").symlink_to("data/w.safetensors")

    assert list(open_manifest(tmp_path).tensors) == ["w"]


def test_a_link_that_the_user_names_is_followed(tmp_path: Path, write_file: Any) -> None:
    folder = write_file("elsewhere/w.safetensors", {"w": 1}).parent
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.safetensors").symlink_to(folder / "w.safetensors")

    assert list(open_manifest(tmp_path / "link").tensors) == ["w"]


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path: Path, write_file: Any) -> None:
    model = tmp_path / "models--org--name"
    write_file("0a1b2c", {"w": 1}, model / "blobs")
    (model / "blobs" / "3d4e5f").write_text('{"model_type": "llama"}')
    snapshot = model / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b2c")
    (snapshot / "config.json").symlink_to("../../blobs/3d4e5f")

    manifest = open_manifest(snapshot)

    assert list(manifest.tensors) == ["w"]
    assert manifest.model_type == "llama"
    assert manifest.file_uri(0) == str(snapshot / "model.safetensors")


def test_a_link_of_a_hugging_face_cache_to_another_models_blobs_is_not(tmp_path: Path, write_file: Any) -> None:
    write_file("0a1b2c", {"w": 1}, tmp_path / "models--org--other" / "blobs")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../../models--org--other/blobs/0a1b2c")

    with pytest.raises(RequestError, match=r"model.safetensors: is a link to .*models--org--other/blobs"):
        open_manifest(snapshot)


def test_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").symlink_to("gone")
    write_index(tmp_path, {"w": "w.safetensors"})

    with pytest.raises(RequestError, match="w.safetensors: is a link to gone, which is not there"):
        open_manifest(tmp_path)


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").symlink_to("w.safetensors")

    with pytest.raises(RequestError, match=r"w.safetensors: .*symbolic links"):
        open_manifest(tmp_path / "w.safetensors")


def _open_as_nobody(path: Any, results: Any) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        open_manifest(path)
        results.send(None)
    except BaseException as error:
        results.send(error)
        raise


def open_as_nobody(path: Any) -> Any:
    """What opening raises in a process without privileges; root would read everything."""
    context = multiprocessing.get_context("fork")  # the interpreter may be where only root can read
    here, there = context.Pipe()
    process = context.Process(target=_open_as_nobody, args=(str(path), there))
    process.start()
    assert here.poll(60)
    error = here.recv()
    process.join(60)
    return error


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[Any]:
    """Makes pytest's own folders passable, so that only what a test closes is closed."""
    changed = [(folder, folder.stat().st_mode) for folder in (tmp_path, *tmp_path.parents[:2])]
    for folder, mode in changed:
        folder.chmod(mode | 0o755)
    yield
    for folder, mode in changed:
        folder.chmod(mode)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user of a process")


@needs_root
def test_what_is_readable_opens_without_privileges(open_to_all: None, indexed_folder: Path) -> None:
    assert open_as_nobody(indexed_folder) is None


@needs_root
def test_a_file_without_permission(open_to_all: None, indexed_folder: Path) -> None:
    path = indexed_folder / "model-00002-of-00002.safetensors"
    path.chmod(0o600)

    error = open_as_nobody(indexed_folder)

    assert isinstance(error, RequestError)
    assert f"{path}: no permission to read it" in str(error)


@needs_root
def test_a_folder_without_permission(open_to_all: None, indexed_folder: Path) -> None:
    indexed_folder.chmod(0o700)

    error = open_as_nobody(indexed_folder)

    assert isinstance(error, RequestError)
    assert f"{indexed_folder}: no permission to read it" in str(error)


@needs_root
def test_a_path_below_a_folder_without_permission(open_to_all: None, indexed_folder: Path) -> None:
    indexed_folder.chmod(0o600)

    error = open_as_nobody(indexed_folder / "model-00001-of-00002.safetensors")

    assert isinstance(error, RequestError)
    assert "model-00001-of-00002.safetensors: no permission to read it" in str(error)
