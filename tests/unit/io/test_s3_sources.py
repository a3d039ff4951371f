"""Objects of an S3 API (moto's server on loopback), through a proxy that misbehaves when told to."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamind_ray.config import IoConfig, RetryConfig, aws_environment
from megamind_ray.core.location import parse_location
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io import ReadCounters, Source, crc32, open_manifest, read_with_retry, write_sidecar
from megamind_ray.io.opening import open_location
from megamind_ray.io.s3 import s3_client_name
from megamind_ray.io.s3_source import ObstoreSource, S3fsSource
from megamind_ray.io.verify import record_checksums
from megamind_ray.testing.fault_server import Answer, Fault, FaultProxy, scripted
from megamind_ray.testing.range_server import RangeServer
from megamind_ray.testing.s3_server import S3Server

IO = IoConfig(chunk_bytes=64 << 10, extent_bytes=64 << 10)
DATA = np.random.default_rng(0).bytes(1_000_000)
CLIENTS = {"obstore": ObstoreSource, "s3fs": S3fsSource}
# Patient, so that a busy machine is not taken for a fault of the server's; where silence is the fault, less so.
RETRY = RetryConfig(attempts=3, first_wait_s=0.01, max_wait_s=0.02, request_s=10.0)
IMPATIENT = replace(RETRY, request_s=0.4)


def retry_for(fault: Fault | None) -> RetryConfig:
    return IMPATIENT if fault in (Fault.STALL, Fault.DRIP) else RETRY


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.make_bucket("models")
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine's: variables, files of the AWS tools, the address of an instance's metadata."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def way(s3: S3Server) -> Iterator[FaultProxy]:
    """One for all tests: clients are made anew for each address, which takes s3fs a second."""
    with FaultProxy(s3.uri) as proxy:
        yield proxy


@pytest.fixture
def proxy(s3: S3Server, way: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The way to the server, set up as the AWS tools' users do it."""
    s3.put("models", "d/data.bin", DATA)
    for name, value in s3.environment(way.uri).items():
        monkeypatch.setenv(name, value)
    way.given.clear()
    well = way.answer
    yield way
    way.faults, way.answer = None, well


@pytest.fixture(params=list(CLIENTS))
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3fs":
        pytest.importorskip("s3fs")
        monkeypatch.setitem(sys.modules, "obstore", None)  # as if it were not installed
    return str(request.param)


def open_object(key: str = "d/data.bin", retry: RetryConfig = RETRY) -> Source:
    return open_location(parse_location(f"s3://models/{key}"), io=IO, retry=retry)


@pytest.fixture
def source(proxy: FaultProxy, client: str) -> Source:
    source = open_object()
    assert type(source) is CLIENTS[client]
    return source


def read(source: Source, offset: int, size: int) -> bytes:
    """With retries, as the engine reads."""
    buffer = bytearray(size)
    read_with_retry(source, offset, memoryview(buffer), RETRY, ReadCounters())
    return bytes(buffer)


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (5, 900_000), (999_999, 1), (0, 1_000_000), (7, 0)])
def test_a_range_is_read(source: Source, offset: int, size: int) -> None:
    assert source.size_bytes == len(DATA)
    assert read(source, offset, size) == DATA[offset : offset + size]


def test_a_range_is_summed(source: Source) -> None:
    buffer = memoryview(bytearray(500_000))

    assert source.read_summed(10, buffer) == crc32(DATA[10:500_010])
    assert buffer == DATA[10:500_010]


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
def test_a_fault_is_made_good_by_the_next_attempt(proxy: FaultProxy, client: str, fault: Fault) -> None:
    source = open_object(retry=retry_for(fault))
    proxy.faults = scripted(fault)
    num_requests = proxy.num_requests

    assert read(source, 1000, 20_000) == DATA[1000:21_000]
    assert proxy.given[fault] == 1
    assert proxy.num_requests - num_requests == (1 if fault is Fault.SLOW_START else 2)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.STALL, Fault.WRONG_RANGE, Fault.TOO_MANY, Fault.BROKEN])
def test_a_lasting_fault_is_a_source_error_after_all_attempts(proxy: FaultProxy, client: str, fault: Fault) -> None:
    source = open_object(retry=retry_for(fault))
    proxy.faults = lambda _request: fault
    num_requests = proxy.num_requests

    with pytest.raises(SourceError, match=r"reading bytes \[1000, 21000\) failed 3 times, last with: "):
        read(source, 1000, 20_000)

    assert proxy.num_requests - num_requests == 3


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.STALL, Fault.TOO_MANY, Fault.UNAVAILABLE])
def test_opening_fails_in_time_and_is_not_repeated(proxy: FaultProxy, client: str, fault: Fault) -> None:
    open_object(retry=retry_for(fault))  # what a client asks for once
    proxy.faults = lambda _request: fault
    num_requests = proxy.num_requests

    with pytest.raises(OSError, match=r"\S"):
        open_object(retry=retry_for(fault))

    # aiohttp, below s3fs, asks a second time on a kept connection that ended.
    assert proxy.num_requests - num_requests <= {"obstore": 1, "s3fs": 2}[client]


def test_a_refusal_is_asked_once(proxy: FaultProxy, source: Source) -> None:
    proxy.answer = lambda _request: Answer(403, {})
    num_requests = proxy.num_requests

    with pytest.raises(RequestError, match="no permission to read it"):
        read(source, 0, 8)

    assert proxy.num_requests - num_requests == 1


def test_an_object_that_is_not_there(proxy: FaultProxy, client: str) -> None:
    with pytest.raises(RequestError, match="s3://models/d/nothing: no such file or folder"):
        open_object("d/nothing")


def test_a_bucket_is_not_a_file(proxy: FaultProxy) -> None:
    with pytest.raises(RequestError, match="s3://models: is a bucket, not a file"):
        open_location(parse_location("s3://models"))


def test_a_server_without_byte_ranges(monkeypatch: pytest.MonkeyPatch, client: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "data.bin").write_bytes(DATA)
    with RangeServer(tmp_path, ranges=False) as server:
        for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.uri)
        with pytest.raises(RequestError, match="does not serve byte ranges"):
            read(open_object("data.bin"), 0, 8)


def test_an_object_that_is_replaced_fails_the_next_read(s3: S3Server, source: Source) -> None:
    read(source, 0, 8)
    s3.put("models", "d/data.bin", DATA[::-1])

    with pytest.raises(IntegrityError, match="changed while it was read"):
        read(source, 0, 8)


def test_answers_carry_the_version_so_the_check_asks_nothing(proxy: FaultProxy, source: Source) -> None:
    read(source, 0, 8)
    num_requests = proxy.num_requests

    source.check_unchanged()

    assert proxy.num_requests == num_requests


def test_a_change_before_the_first_read_is_seen_by_the_check(s3: S3Server, source: Source) -> None:
    s3.put("models", "d/data.bin", DATA[:-1])

    with pytest.raises(IntegrityError, match="changed while it was read"):
        source.check_unchanged()


@pytest.mark.usefixtures("proxy", "client")
def test_a_folder_of_a_bucket_is_a_checkpoint(s3: S3Server, indexed_folder: Any) -> None:
    s3.put_folder("models", "org/name", indexed_folder)

    manifest = open_manifest("s3://models/org/name", retry=RETRY)

    assert manifest.tensors == open_manifest(indexed_folder).tensors


@pytest.mark.usefixtures("proxy", "client")
def test_checksums_are_recorded_beside_a_checkpoint(s3: S3Server, write_file: Any) -> None:
    s3.put("models", "sums/model.safetensors", write_file("model.safetensors", {"a": 5000}).read_bytes())
    manifest = open_manifest("s3://models/sums", retry=RETRY)

    write_sidecar(record_checksums(manifest), "s3://models/sums/sums.json")

    assert open_manifest("s3://models/sums", sidecar="s3://models/sums/sums.json").reference is not None


def test_a_file_can_be_loaded_by_who_may_read_but_not_list(
    s3: S3Server, proxy: FaultProxy, client: str, write_file: Any
) -> None:
    """S3 then refuses to say that a file is missing, as the sidecar and the configuration are here."""
    s3.put("models", "one/model.safetensors", write_file("model.safetensors", {"a": 5000}).read_bytes())
    server = proxy.answer
    proxy.answer = lambda it: server(it) if it.path.endswith("/one/model.safetensors") else Answer(403, {})

    assert list(open_manifest("s3://models/one/model.safetensors", retry=RETRY).tensors) == ["a"]


class TestSettings:
    """Where the address and the credentials come from, as users of the AWS tools set them up."""

    @pytest.fixture
    def aws(self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """The folder of the AWS tools; the variables are gone."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name)
        folder = tmp_path / ".aws"
        folder.mkdir()
        return folder

    def key_used(self, proxy: FaultProxy) -> str:
        """The access key that signed the last request, with the region; empty without a signature."""
        return proxy.asked[-1].headers.get("authorization", "").partition("Credential=")[2].partition("/s3/")[0]

    def test_variables(self, proxy: FaultProxy, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKVARIABLE")
        monkeypatch.setenv("AWS_REGION", "eu-west-3")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")

        open_object()

        assert self.key_used(proxy).startswith("AKVARIABLE/")
        assert self.key_used(proxy).endswith("/eu-west-3")

    def test_a_profile(self, proxy: FaultProxy, aws: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (aws / "credentials").write_text("[lab]\naws_access_key_id = AKPROFILE\naws_secret_access_key = s\n")
        (aws / "config").write_text("[profile lab]\nregion = ap-south-1\n")
        monkeypatch.setenv("AWS_PROFILE", "lab")

        open_object()

        assert self.key_used(proxy).startswith("AKPROFILE/")
        assert self.key_used(proxy).endswith("/ap-south-1")

    def test_the_address_in_a_profile(
        self, proxy: FaultProxy, aws: Path, client: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        (aws / "credentials").write_text("[default]\naws_access_key_id = AKFILE\naws_secret_access_key = s\n")
        (aws / "config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {proxy.uri}\n")

        open_object()

        assert self.key_used(proxy).startswith("AKFILE/")

    def test_the_address_of_s3_goes_before_the_common_one(
        self, proxy: FaultProxy, client: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.uri)

        assert open_object().size_bytes == len(DATA)

    def test_without_credentials_requests_are_not_signed(self, s3: S3Server, proxy: FaultProxy, aws: Path) -> None:
        s3.put("models", "d/data.bin", DATA, public=True)

        assert open_object().size_bytes == len(DATA)
        assert self.key_used(proxy) == ""

    def test_a_changed_environment_is_seen(self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        open_object()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKROTATED")
        open_object()

        assert self.key_used(proxy).startswith("AKROTATED/")

    def test_a_profile_that_is_not_there_is_named(self, aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_PROFILE", "elsewhere")

        with pytest.raises(RequestError, match=r"settings of the AWS tools cannot be used: .*elsewhere"):
            open_object()

    def test_an_environment_shows_no_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")

        assert "topsecret" not in repr(aws_environment())

    @pytest.mark.parametrize("fault", [Fault.RESET, Fault.UNAVAILABLE, Fault.WRONG_RANGE])
    def test_no_secret_is_in_a_message(
        self, proxy: FaultProxy, client: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "sessionsecret")
        proxy.faults = lambda _request: fault if _request.method == "GET" else None

        with pytest.raises(MegamindError) as caught:
            read(open_object(), 0, 80)

        text = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
        assert "topsecret" not in text
        assert "sessionsecret" not in text


class TestChoice:
    """Which client is used."""

    environment = replace(aws_environment({"HOME": "/nowhere"}), needs_files=False)

    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Only these packages are there, and fsspec has no settings of its own."""
        monkeypatch.setattr("fsspec.config.conf", {})
        return lambda *names: monkeypatch.setattr("megamind_ray.io.s3._installed", lambda name: name in names)

    def test_obstore_by_default(self, install: Callable[..., None]) -> None:
        install("obstore", "botocore", "s3fs")

        assert s3_client_name(self.environment) == "obstore"
        assert s3_client_name(replace(self.environment, needs_files=True)) == "obstore"

    def test_s3fs_where_fsspec_has_settings_for_it(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install("obstore", "botocore", "s3fs")
        monkeypatch.setattr("fsspec.config.conf", {"s3": {"anon": True}})

        assert s3_client_name(self.environment) == "s3fs"

    def test_s3fs_where_obstore_is_not_installed(self, install: Callable[..., None]) -> None:
        install("s3fs", "botocore")

        assert s3_client_name(self.environment) == "s3fs"

    def test_s3fs_for_a_profile_that_obstore_cannot_read(self, install: Callable[..., None]) -> None:
        install("obstore", "s3fs")

        assert s3_client_name(self.environment) == "obstore"
        assert s3_client_name(replace(self.environment, needs_files=True)) == "s3fs"

    def test_what_is_missing_for_a_profile_is_named(self, install: Callable[..., None]) -> None:
        install("obstore")

        with pytest.raises(RequestError, match=r"need botocore; run: pip install 'megamind-ray\[s3\]'"):
            s3_client_name(replace(self.environment, needs_files=True))

    def test_what_is_missing_at_all_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "obstore", None)
        monkeypatch.setitem(sys.modules, "s3fs", None)

        with pytest.raises(RequestError, match=r"s3://.*; run: pip install 'megamind-ray\[s3\]'$"):
            open_manifest("s3://bucket/model")

    @pytest.mark.parametrize(
        ("variables", "needs_files"),
        [
            ({}, True),
            ({"AWS_ACCESS_KEY_ID": "k"}, False),
            ({"AWS_SKIP_SIGNATURE": "true"}, False),
            ({"AWS_ACCESS_KEY_ID": "k", "AWS_PROFILE": "lab"}, True),
        ],
    )
    def test_when_files_are_needed(self, tmp_path: Path, variables: dict[str, str], needs_files: bool) -> None:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "credentials").write_text("[default]\n")

        assert aws_environment({"HOME": str(tmp_path), **variables}).needs_files is needs_files
        assert aws_environment({"HOME": "/nowhere"}).needs_files is False


# Reads an object, forks, and says what the child can do with it.
_FORKING = """
import os, sys
from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import parse_location
from megamind_ray.errors import RequestError
from megamind_ray.io.opening import open_location

def begin_of(source):
    buffer = bytearray(8)
    source.read_into(0, memoryview(buffer))
    return bytes(buffer)

def opened():
    return open_location(parse_location("s3://models/d/data.bin"), io=IoConfig(), retry=RetryConfig(request_s=10.0))

def said(action):
    try:
        return action()
    except RequestError as error:
        return str(error)

source = opened()
begin_of(source)
child = os.fork()
if child == 0:
    print(said(lambda: begin_of(source)))
    print(said(lambda: (type(opened()).__name__, begin_of(opened()))))
    sys.modules["s3fs"] = None
    print(said(opened), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(type(source).__name__, begin_of(source))
"""


def test_in_a_forked_process_obstore_is_not_waited_for(proxy: FaultProxy) -> None:
    pytest.importorskip("s3fs")
    result = subprocess.run(
        [sys.executable, "-c", _FORKING], capture_output=True, text=True, timeout=60, check=False, env=os.environ
    )

    assert result.returncode == 0, result.stderr
    old, new, without, parent = result.stdout.splitlines()
    assert "s3://models/d/data.bin: was opened by process" in old
    assert new == str(("S3fsSource", DATA[:8]))
    assert "start processes with spawn" in without
    assert parent == f"ObstoreSource {DATA[:8]}"


@pytest.mark.usefixtures("proxy", "client")
class TestBuckets:
    """The root of a bucket is a folder; what is beside it belongs to somebody else."""

    @pytest.mark.parametrize("uri", ["s3://root", "s3://root/"])
    def test_a_checkpoint_at_the_root_of_a_bucket(
        self, s3: S3Server, proxy: FaultProxy, uri: str, indexed_folder: Any
    ) -> None:
        s3.make_bucket("root")
        for path in indexed_folder.iterdir():
            s3.put("root", path.name, path.read_bytes())
        asked: list[str] = []
        server = proxy.answer
        proxy.answer = lambda it: (asked.append(it.path), server(it))[1]

        assert open_manifest(uri, retry=RETRY).tensors == open_manifest(indexed_folder).tensors
        assert {path.split("?")[0].split("/")[1] for path in asked} == {"root"}

    def test_a_bucket_of_folders_lists_them(self, s3: S3Server) -> None:
        s3.make_bucket("shelf")
        s3.put("shelf", "llama/model.safetensors", DATA)

        with pytest.raises(RequestError, match=r"s3://shelf: no .safetensors files .*it has the folders llama"):
            open_manifest("s3://shelf", retry=RETRY)

    @pytest.mark.parametrize("uri", ["s3://nowhere", "s3://nowhere/llama", "s3://nowhere/llama/model.safetensors"])
    def test_a_bucket_that_is_not_there_is_a_mistake_and_asked_for_once(
        self, proxy: FaultProxy, client: str, uri: str
    ) -> None:
        num_requests = proxy.num_requests

        with pytest.raises(RequestError, match=r"s3://nowhere\S*: no such ") as caught:
            open_manifest(uri, retry=RETRY)

        assert "<" not in str(caught.value)
        assert client == "s3fs" or ("no such bucket" in str(caught.value) and proxy.num_requests - num_requests <= 2)


_UNREACHABLE = """
from megamind_ray.config import RetryConfig
from megamind_ray.errors import SourceError
from megamind_ray.io import open_manifest
try:
    open_manifest("s3://models/x", retry=RetryConfig(attempts=1))
except SourceError:
    raise SystemExit(3)
"""


def test_a_failure_lets_the_process_end_as_it_should() -> None:
    """It aborted in three of ten runs, while threads of the client let go of what they had been waited for with."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
    nowhere = {**os.environ, **keys, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    results = [
        subprocess.run(
            [sys.executable, "-c", _UNREACHABLE], capture_output=True, text=True, timeout=60, check=False, env=nowhere
        )
        for _ in range(3)
    ]

    assert [result.returncode for result in results] == [3, 3, 3], results[0].stderr
