import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors import safe_open

from megamind_ray.errors import IntegrityError, RequestError
from megamind_ray.io import open_manifest


def test_a_single_file(write_file: Any) -> None:
    path = write_file("w.safetensors", {"a": 3, "b": 5}, metadata={"format": "pt"})

    manifest = open_manifest(path)

    assert manifest.uri == str(path)
    assert manifest.root == str(path.parent)
    assert manifest.file_uri(0) == str(path)
    (file,) = manifest.files
    assert (file.path, file.size_bytes, file.metadata) == ("w.safetensors", path.stat().st_size, {"format": "pt"})
    assert file.mtime_ns == path.stat().st_mtime_ns
    assert {name: tensor.nbytes for name, tensor in manifest.tensors.items()} == {"a": 3, "b": 5}
    assert manifest.config == {}
    assert manifest.reference is None


def test_a_folder_with_an_index(indexed_folder: Path) -> None:
    manifest = open_manifest(indexed_folder)

    assert [file.path for file in manifest.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {name: tensor.file for name, tensor in manifest.tensors.items()} == {"a": 0, "b": 0, "c": 1}


def test_ranges_are_where_safetensors_finds_the_bytes(indexed_folder: Path) -> None:
    manifest = open_manifest(indexed_folder)

    for name, tensor in manifest.tensors.items():
        path = manifest.file_uri(tensor.file)
        with safe_open(path, "numpy") as file, Path(path).open("rb") as raw:
            raw.seek(tensor.begin)
            assert raw.read(tensor.nbytes) == file.get_tensor(name).tobytes()


def test_an_index_given_directly(indexed_folder: Path) -> None:
    manifest = open_manifest(indexed_folder / "model.safetensors.index.json")

    assert manifest.root == str(indexed_folder)
    assert list(manifest.tensors) == ["a", "b", "c"]


def test_files_that_the_index_does_not_name_are_left_alone(indexed_folder: Path, write_file: Any) -> None:
    write_file("consolidated.safetensors", {"a": 100, "other": 1}, indexed_folder)

    assert list(open_manifest(indexed_folder).tensors) == ["a", "b", "c"]


def test_tensors_that_the_index_forgot_are_loaded_as_transformers_does(indexed_folder: Path) -> None:
    index = indexed_folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["b"]
    index.write_text(json.dumps(document))

    assert list(open_manifest(indexed_folder).tensors) == ["a", "b", "c"]


def test_several_files_without_an_index(tmp_path: Path, write_file: Any) -> None:
    write_file("two.safetensors", {"c": 1})
    write_file("one.safetensors", {"b": 1, "a": 1})
    write_file(".hidden.safetensors", {"h": 1})
    (tmp_path / "README.md").write_text("weights")

    manifest = open_manifest(tmp_path)

    assert [file.path for file in manifest.files] == ["one.safetensors", "two.safetensors"]
    assert list(manifest.tensors) == ["b", "a", "c"]


def test_the_second_copy_under_mistrals_names_is_not_loaded_too(tmp_path: Path, write_file: Any) -> None:
    write_file("model.safetensors", {"model.w": 1})
    write_file("consolidated.safetensors", {"w": 1})

    assert list(open_manifest(tmp_path).tensors) == ["model.w"]


def test_only_the_second_copy_is_a_checkpoint_as_well(tmp_path: Path, write_file: Any) -> None:
    write_file("consolidated.00.safetensors", {"w": 1})

    assert list(open_manifest(tmp_path).tensors) == ["w"]


def test_files_in_folders_that_an_index_names(tmp_path: Path, write_file: Any) -> None:
    write_file("parts/one.safetensors", {"a": 1})
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "./parts/one.safetensors"}}))

    manifest = open_manifest(tmp_path)

    assert manifest.files[0].path == "parts/one.safetensors"
    assert Path(manifest.file_uri(0)).exists()


def test_config_and_tied_names(write_file: Any, tmp_path: Path) -> None:
    write_file("model.safetensors", {"model.embed_tokens.weight": 4})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))

    manifest = open_manifest(tmp_path)

    assert manifest.config == config
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_only_what_describes_the_weights_is_read(write_file: Any, tmp_path: Path) -> None:
    write_file("model.safetensors", {"w": 100_000})
    (tmp_path / "config.json").write_text("{}")

    manifest = open_manifest(tmp_path)

    assert manifest.header_bytes == manifest.files[0].data_begin + len("{}")


def test_many_sparse_files_with_long_headers(tmp_path: Path, frame: Any) -> None:
    weight_map = {}
    for number in range(40):
        names = [f"model.layers.{number}.mlp.experts.{expert}.down_proj.weight" for expert in range(560)]
        size = 7168 * 2048
        entries = {
            name: {"dtype": "F8_E4M3", "shape": [7168, 2048], "data_offsets": [at * size, (at + 1) * size]}
            for at, name in enumerate(names)
        }
        path = tmp_path / f"model-{number:05}.safetensors"
        path.write_bytes(frame(json.dumps(entries).encode()))
        os.truncate(path, path.stat().st_size + len(names) * size)
        weight_map |= dict.fromkeys(names, path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    manifest = open_manifest(tmp_path)

    assert len(manifest.files) == 40
    assert len(manifest.tensors) == 40 * 560
    assert manifest.nbytes == 40 * 560 * 7168 * 2048
    assert manifest.header_bytes < 12_000_000


@pytest.mark.parametrize(
    "form",
    ["{path}", "{path}/", "file:{path}", "file://{path}", "file://localhost{path}", "{path}/../model", "FOLDER/model"],
)
def test_forms_of_a_local_folder(indexed_folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(indexed_folder.parent.parent)
    uri = form.format(path=indexed_folder).replace("FOLDER", indexed_folder.parent.name)

    manifest = open_manifest(uri)

    assert manifest.uri == uri
    assert manifest.root == str(indexed_folder)


def test_the_home_folder(indexed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(indexed_folder.parent))

    assert open_manifest("~/model").root == str(indexed_folder)


def test_a_file_uri_with_escapes(write_file: Any, tmp_path: Path) -> None:
    path = write_file("with space.safetensors", {"w": 1})

    assert open_manifest("file://" + str(path).replace(" ", "%20")).file_uri(0) == str(path)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_a_folder_in_an_fsspec_file_system(indexed_folder: Path, memory: Any) -> None:
    for path in indexed_folder.iterdir():
        memory.pipe_file(f"/bucket/model/{path.name}", path.read_bytes())
    local = open_manifest(indexed_folder)

    manifest = open_manifest("memory://bucket/model/")

    assert manifest.root == "memory://bucket/model"
    assert manifest.tensors == local.tensors
    assert manifest.header_bytes == local.header_bytes


def test_a_single_file_in_an_fsspec_file_system(encode: Any, memory: Any) -> None:
    memory.pipe_file("/bucket/w.safetensors", encode({"w": ("U8", [2], b"xy")}))

    manifest = open_manifest("memory://bucket/w.safetensors")

    assert manifest.file_uri(0) == "memory://bucket/w.safetensors"
    assert list(manifest.tensors) == ["w"]


def test_a_missing_place_in_an_fsspec_file_system(memory: Any) -> None:
    with pytest.raises(RequestError, match="memory://bucket/nothing: no such file or folder"):
        open_manifest("memory://bucket/nothing")


@pytest.mark.parametrize(("scheme", "package", "extra"), [("gs", "gcsfs", "gcs"), ("az", "adlfs", "azure")])
def test_the_extra_with_a_missing_package_is_named(
    scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(RequestError, match=rf"{scheme}://.*; run: pip install 'megamind-ray\[{extra}\]'$"):
        open_manifest(f"{scheme}://bucket/model")


@pytest.mark.parametrize("uri", ["ftp://host/model", "simplecache::s3://bucket/model", "C://model"])
def test_an_unknown_scheme_lists_the_forms(uri: str) -> None:
    with pytest.raises(RequestError, match=r"is not supported; give a path, file:, s3://, .* or memory://"):
        open_manifest(uri)


@pytest.mark.parametrize("uri", ["", "s3://", "file:", "file://elsewhere/model", "a\0b"])
def test_a_uri_that_names_nothing(uri: str) -> None:
    with pytest.raises(RequestError):
        open_manifest(uri)


def test_a_file_that_changes_while_its_header_is_read(write_file: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = write_file("w.safetensors", {"w": 10})
    real = os.preadv

    def read_and_touch(fd: Any, buffers: Any, offset: int) -> Any:
        os.utime(path, ns=(1, 1))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_and_touch)

    with pytest.raises(IntegrityError, match=r"w.safetensors: changed while it was read \(mtime in ns was \d+, is 1\)"):
        open_manifest(path)


def test_neither_torch_nor_ray_nor_fsspec_is_imported_for_a_local_checkpoint(write_file: Any) -> None:
    path = write_file("w.safetensors", {"w": 10})
    code = (
        "import sys; from megamind_ray.io import open_manifest; "
        f"open_manifest({str(path)!r}); print({{'torch', 'ray', 'fsspec'}} & set(sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "set()"
