"""``hf://`` against a hub made by hand: its API, its redirects to signed addresses, and the files behind them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from megamind_ray.config import RetryConfig, hub_cache_path
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io import open_manifest, open_source
from megamind_ray.io.hub_cache import cached_snapshot, offline_remedy
from megamind_ray.testing.fault_server import Answer, Fault, FaultServer, Request, scripted
from megamind_ray.testing.range_server import RangeServer

pytest.importorskip("huggingface_hub")

RETRY = RetryConfig(attempts=3, first_wait_s=0.01, max_wait_s=0.02, request_s=10.0)
COMMIT = "c0ffee" + "0" * 34


class Hub(FaultServer):
    """One model, ``org/name``, whose files are on another server."""

    def __init__(self, folder: Path, files: RangeServer) -> None:
        self._folder, self._files = folder, files
        super().__init__(self._answer)

    def _answer(self, request: Request) -> Answer:
        path = urlsplit(request.path).path
        if path.startswith("/org/name/resolve/main/"):
            return self._redirect(path.removeprefix("/org/name/resolve/main/"))
        if path.startswith("/api/models/org/name/tree/"):
            return self._json(self._entries())
        if path.startswith("/api/models/org/name/paths-info/"):
            text = request.body.decode()
            wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
            return self._json([entry for entry in self._entries() if entry["path"] in wanted])
        if path.startswith("/api/models/org/name"):
            return self._json({"id": "org/name", "sha": COMMIT, "siblings": []})
        return Answer(404, {"X-Error-Code": "RepoNotFound"})

    def _redirect(self, name: str) -> Answer:
        if not (self._folder / name).exists():
            return Answer(404, {"X-Error-Code": "EntryNotFound"})
        return Answer(302, {"Location": f"{self._files.uri}/{name}?Signature=f00d42", "X-Repo-Commit": COMMIT})

    def _entries(self) -> list[dict[str, Any]]:
        paths = sorted(self._folder.iterdir())
        return [{"type": "file", "path": it.name, "size": it.stat().st_size, "oid": "b" * 40} for it in paths]

    def _json(self, document: Any) -> Answer:
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode())


@pytest.fixture
def model(tmp_path: Path, write_file: Any) -> Path:
    """The folder with the model's files."""
    return Path(write_file("model.safetensors", {"a": 200_000, "b": 50}, tmp_path / "files")).parent


@pytest.fixture
def files(model: Path) -> Iterator[RangeServer]:
    with RangeServer(model) as files:
        yield files


@pytest.fixture
def hub(model: Path, files: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(model, files) as hub:
        options = {"endpoint": hub.uri, "token": "hf_secret", "skip_instance_cache": True}
        monkeypatch.setattr("fsspec.config.conf", {"hf": options})
        yield hub


def read_tensor(manifest: Any, name: str) -> bytes:
    tensor = manifest.tensors[name]
    buffer = np.zeros(tensor.nbytes, np.uint8)
    with open_source(manifest.file_uri(0), manifest.files[0], retry=RETRY) as source:
        source.read_into(tensor.begin, memoryview(buffer))
        source.check_unchanged()
    return buffer.tobytes()


def test_a_model_of_the_hub_is_read_by_exact_ranges(hub: Hub, files: RangeServer, model: Path) -> None:
    manifest = open_manifest("hf://org/name", retry=RETRY)
    bytes_sent = files.bytes_sent

    content = read_tensor(manifest, "a")

    tensor = manifest.tensors["a"]
    assert content == (model / "model.safetensors").read_bytes()[tensor.begin : tensor.end]
    assert files.bytes_sent - bytes_sent == 200_000


def test_the_hub_is_asked_for_the_address_once_and_not_for_each_range(hub: Hub, model: Path) -> None:
    manifest = open_manifest("hf://org/name", retry=RETRY)
    with open_source(manifest.file_uri(0), manifest.files[0], retry=RETRY) as source:
        num_requests = hub.num_requests
        for offset in range(0, 1000, 100):
            source.read_into(offset, memoryview(bytearray(100)))

    assert hub.num_requests == num_requests


def test_the_token_goes_to_the_hub_alone(hub: Hub, files: RangeServer) -> None:
    open_manifest("hf://org/name", retry=RETRY)

    asked = [it for it in hub.asked if "/resolve/" in it.path]
    assert {it.headers.get("authorization") for it in asked} == {"Bearer hf_secret"}
    assert all("authorization" not in it.headers for it in files.asked)


def test_a_model_that_changes_between_plan_and_load(hub: Hub, model: Path, write_file: Any) -> None:
    manifest = open_manifest("hf://org/name", retry=RETRY)
    write_file("model.safetensors", {"a": 200_000, "b": 51}, model)

    with pytest.raises(IntegrityError, match=r"hf://org/name/model.safetensors: changed since it was planned"):
        read_tensor(manifest, "a")


def test_a_fault_behind_the_hub_is_made_good(hub: Hub, files: RangeServer) -> None:
    files.faults = scripted(Fault.TRUNCATED, Fault.UNAVAILABLE)

    assert set(open_manifest("hf://org/name", retry=RETRY).tensors) == {"a", "b"}
    assert files.given.total() == 2


def test_a_model_that_is_not_there_names_it_and_no_token(hub: Hub) -> None:
    with pytest.raises(RequestError, match="hf://org/other: no such file or folder") as caught:
        open_manifest("hf://org/other", retry=RETRY)

    assert "hf_secret" not in repr(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub's client; empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def in_cache(cache: Path, model: Path) -> Path:
    """Puts the model into the cache, as the client does; gives the folder of its snapshot."""
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    return Path(shutil.copytree(model, folder / "snapshots" / COMMIT))


def test_a_hub_that_cannot_be_reached_says_how_to_get_the_model_elsewhere(hub: Hub, cache: Path) -> None:
    hub.close()

    with pytest.raises(SourceError, match="check the network, or download it where the hub can be reached") as caught:
        open_manifest("hf://org/name@v1", retry=RETRY)

    assert "`hf download org/name --revision v1 --local-dir DIR`" in caught.value.message
    assert f"{cache}, this machine's cache, has no copy" in caught.value.message


def test_a_hub_that_cannot_be_reached_points_at_the_copy_in_the_cache(hub: Hub, cache: Path, model: Path) -> None:
    snapshot = in_cache(cache, model)
    hub.close()

    with pytest.raises(SourceError, match=f"load the copy in this machine's cache: {snapshot}$"):
        open_manifest("hf://org/name", retry=RETRY)

    assert set(open_manifest(snapshot).tensors) == {"a", "b"}


def test_a_client_that_was_told_to_stay_offline_is_asked_once(
    hub: Hub, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = in_cache(cache, model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(RequestError, match=f"HF_HUB_OFFLINE is set; unset it, or load the copy .*: {snapshot}$"):
        open_manifest("hf://org/name", retry=RETRY)

    assert hub.num_requests == 0


@pytest.mark.parametrize("uri", ["hf://datasets/org/name", "hf://gpt2"])
def test_what_is_no_model_of_the_hub_has_no_place_in_the_cache(uri: str, cache: Path) -> None:
    assert offline_remedy(uri) == "download it where the hub can be reached, and give the folder of the copy"


@pytest.mark.parametrize("revision", [COMMIT, "main", COMMIT[:7], ".", "a/b"])
def test_a_snapshot_is_found_by_its_commit_and_by_what_refers_to_it(cache: Path, model: Path, revision: str) -> None:
    snapshot = in_cache(cache, model)

    assert cached_snapshot("org/name", revision) == (snapshot if revision in (COMMIT, "main") else None)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_cache_is_where_the_client_has_it(environ: dict[str, str], path: str) -> None:
    assert str(hub_cache_path(environ)) == path
