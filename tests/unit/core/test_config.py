from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.config import (
    Config,
    DeadlineConfig,
    IoConfig,
    LoadConfig,
    PlanConfig,
    PoolConfig,
    RetryConfig,
    RoutingConfig,
    aws_environment,
    load_config,
    ray_address,
)
from megamind_ray.errors import RequestError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('[io]\nchunk_bytes = "12MiB"\nread_threads = 7\n[retry]\nmax_wait_s = 9\n')
    return path


def test_without_a_word_the_defaults_hold() -> None:
    assert load_config(environ={}) == Config()


def test_later_sources_win_field_by_field(file: Path) -> None:
    environ = {"MEGAMIND_IO_READ_THREADS": "8", "MEGAMIND_RETRY_ATTEMPTS": "2"}

    config = load_config(file, {"retry": {"attempts": 3}}, environ)

    assert config.io == IoConfig(chunk_bytes=12 << 20, read_threads=8)
    assert config.retry == RetryConfig(attempts=3, max_wait_s=9.0)
    assert type(config.retry.max_wait_s) is float


def test_the_environment_names_the_file(file: Path) -> None:
    assert load_config(environ={"MEGAMIND_CONFIG": str(file)}).io.read_threads == 7


@pytest.mark.parametrize(
    ("name", "text", "section", "field", "value"),
    [
        ("MEGAMIND_IO_CHUNK_BYTES", "16MiB", "io", "chunk_bytes", 16 << 20),
        ("MEGAMIND_IO_MAX_GAP_BYTES", "8192", "io", "max_gap_bytes", 8192),
        ("MEGAMIND_ROUTING_FORCE_POOL", "true", "routing", "force_pool", True),
        ("MEGAMIND_ROUTING_FORCE_POOL", "0", "routing", "force_pool", False),
        ("MEGAMIND_POOL_MAX_FRACTION", "0.5", "pool", "max_fraction", 0.5),
        ("MEGAMIND_PLACEMENT_POLICY", "first_fit", "placement", "policy", "first_fit"),
    ],
)
def test_variables_are_read_as_the_type_of_their_field(
    name: str, text: str, section: str, field: str, value: object
) -> None:
    assert getattr(getattr(load_config(environ={name: text}), section), field) == value


def test_variables_of_others_are_left_alone() -> None:
    environ = {"HOME": "/", "MEGAMIND_TEST_X": "1", "MEGAMIND_REQUIRE_Y": "1", "RAY_ADDRESS": "10.0.0.1:6379"}

    assert load_config(environ=environ) == Config()
    assert ray_address(environ) == "10.0.0.1:6379"
    assert ray_address({}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("io = 3", "io = 3 must be a section"),
        ("[disk]\nx = 1", "no section 'disk' in the configuration; there are io, retry"),
        ("[io]\nchunks = 1", "no setting io.chunks; there are chunk_bytes"),
        ("[io]\nread_threads = '4x'", "io.read_threads = '4x': not a number"),
        ("[io]\nread_threads = true", "io.read_threads = True: must be of type int"),
        ("[io]\nread_threads = 1.5", "io.read_threads = 1.5: must be of type int"),
        ("[io]\nchunk_bytes = 'big'", "io.chunk_bytes: 'big' is not a size"),
        ("[routing]\nforce_pool = 'maybe'", "routing.force_pool = 'maybe': must be of type bool"),
        ("[placement]\npolicy = 1", "placement.policy = 1: must be of type str"),
        ("[io", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_are_named_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)

    with pytest.raises(RequestError) as error:
        load_config(path, environ={})

    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.toml: cannot be read"):
        load_config(tmp_path / "none.toml", environ={})


@pytest.mark.parametrize("text", ["inf", "1e400", "9" * 30, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("name", ["MAX_WAIT_S", "REQUEST_S", "FIRST_WAIT_S", "QUARANTINE_SHARE", "QUARANTINE_READS"])
def test_numbers_beyond_all_bounds_are_refused(name: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"retry.{name.lower()}"):
        load_config(environ={f"MEGAMIND_RETRY_{name}": text})


@pytest.mark.parametrize("number", ["9" * 400, "0x" + "f" * 5000])
def test_numbers_of_a_file_may_be_too_long_to_be_shown(tmp_path: Path, number: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[retry]\nmax_wait_s = {number}\n")

    with pytest.raises(RequestError, match="retry.max_wait_s: the number has more than 18 digits"):
        load_config(path, environ={})


def test_an_empty_name_of_a_file_is_none() -> None:
    assert load_config(environ={"MEGAMIND_CONFIG": ""}) == Config()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for path, environ in ((tmp_path / "pipe", {}), (None, {"MEGAMIND_CONFIG": str(tmp_path / "pipe")})):
        with pytest.raises(RequestError, match=r"pipe: cannot be read \(it is not a regular file\)"):
            load_config(path, environ=environ)


@pytest.mark.parametrize("name", ["MEGAMIND_IO", "MEGAMIND_IO_CHUNKS", "MEGAMIND_DISK_X"])
def test_a_mistyped_variable_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="environment: no "):
        load_config(environ={name: "1"})


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (IoConfig, {"chunk_bytes": 65535}, "io.chunk_bytes"),
        (IoConfig, {"chunk_bytes": 65536 + 512}, "io.chunk_bytes"),
        (IoConfig, {"extent_bytes": 4 << 20}, "io.extent_bytes"),
        (IoConfig, {"max_gap_bytes": 9 << 20}, "io.max_gap_bytes"),
        (IoConfig, {"read_threads": 0}, "io.read_threads"),
        (IoConfig, {"remote_threads": 0}, "io.remote_threads"),
        (IoConfig, {"remote_gap_bytes": -1}, "io.remote_gap_bytes"),
        (RetryConfig, {"attempts": 0}, "retry.attempts"),
        (RetryConfig, {"first_wait_s": 6.0}, "retry.first_wait_s"),
        (RetryConfig, {"max_wait_s": float("nan")}, "retry.max_wait_s"),
        (RetryConfig, {"max_wait_s": float("inf")}, "retry.max_wait_s"),
        (RetryConfig, {"max_wait_s": -1.0}, "retry.max_wait_s"),
        (RetryConfig, {"first_wait_s": float("nan")}, "retry.first_wait_s"),
        (RetryConfig, {"request_s": float("inf")}, "retry.request_s"),
        (RetryConfig, {"quarantine_share": float("nan")}, "retry.quarantine_share"),
        (PoolConfig, {"max_fraction": 0.76}, "pool.max_fraction"),
        (PoolConfig, {"keep_fraction": -0.1}, "pool.keep_fraction"),
        (PlanConfig, {"max_replicated_share": 1.1}, "plan.max_replicated_share"),
        (PlanConfig, {"alignment_bytes": 8}, "plan.alignment_bytes"),
        (PlanConfig, {"alignment_bytes": 48}, "plan.alignment_bytes"),
        (PlanConfig, {"alignment_bytes": 8192}, "plan.alignment_bytes"),
        (RoutingConfig, {"min_direct_bytes": -1}, "routing.min_direct_bytes"),
        (LoadConfig, {"max_worker_restarts": -1}, "load.max_worker_restarts"),
        (DeadlineConfig, {"poll_s": 0.0}, "deadlines.poll_s"),
        (DeadlineConfig, {"stall_s": float("inf")}, "deadlines.stall_s"),
    ],
)
def test_values_out_of_bounds_are_named_with_a_remedy(kind: type, values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^config {field} = .*: .*(take|must be|0 to)"):
        kind(**values)


@pytest.mark.parametrize("way", ["file", "environment", "argument", "class"])
def test_mirrors_are_of_the_folder_where_the_configuration_was_made(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bases = ["copies/m", "s3://b/m/", "~/m"]
    file = tmp_path / "config.toml"
    file.write_text(f"[io]\nmirrors = {bases}\n")
    monkeypatch.setenv("HOME", "/home/ada")
    made = {
        "file": lambda: load_config(file, environ={}),
        "environment": lambda: load_config(environ={"MEGAMIND_IO_MIRRORS": ",".join(bases)}),
        "argument": lambda: load_config(overrides={"io": {"mirrors": bases}}, environ={}),
        "class": lambda: Config(io=IoConfig(mirrors=tuple(bases))),
    }[way]()

    monkeypatch.chdir("/")
    sent = pickle.loads(pickle.dumps(made))

    assert sent.io.mirrors == (str(tmp_path / "copies/m"), "s3://b/m", "/home/ada/m")
    assert replace(sent.io, chunk_bytes=1 << 20).mirrors == sent.io.mirrors


@pytest.mark.parametrize(
    ("given", "meant"),
    [("fleet.toml", "{cwd}/fleet.toml"), ("~/fleet.toml", "/home/ada/fleet.toml"), ("/f.toml", "/f.toml"), ("", "")],
)
def test_a_topology_file_is_of_the_folder_where_the_configuration_was_made(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    made = load_config(overrides={"plan": {"topology": given}}, environ={})
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(made)).plan.topology == meant.format(cwd=tmp_path)


@pytest.mark.parametrize("given", ["s3://b/fleet.toml", "ftp://h/fleet.toml", "a\0b"])
def test_a_topology_that_is_no_file_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match=r"config plan\.topology"):
        load_config(overrides={"plan": {"topology": given}}, environ={})


def test_a_mirror_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RequestError, match=r"config io\.mirrors: ftp://h/m: ftp:// is not supported"):
        IoConfig(mirrors=("ftp://h/m",))


def test_a_home_that_cannot_be_looked_into_has_no_files_of_the_aws_tools() -> None:
    # A name too long is refused to every user; a folder without permission not to root.
    assert not aws_environment({"HOME": "/" + "x" * 300}).needs_files


@pytest.mark.parametrize(("cores", "threads"), [(2, 8), (16, 8), (32, 16), (64, 32), (256, 32)])
def test_a_node_agent_has_threads_for_half_of_its_cores(cores: int, threads: int) -> None:
    assert IoConfig().for_agent(cores).read_threads == threads


def test_a_number_of_agent_threads_that_is_set_holds_on_every_node() -> None:
    assert IoConfig(agent_threads=3).for_agent(256).read_threads == 3


def test_an_agent_has_room_for_its_longest_extent() -> None:
    assert IoConfig().for_agent(4, 128 << 20).extent_bytes == 128 << 20
    assert IoConfig().for_agent(4, 1 << 20).extent_bytes == IoConfig().extent_bytes


def test_extents_of_the_pool_are_as_the_plan_finds_or_at_least_a_chunk() -> None:
    assert IoConfig(pool_extent_bytes=8 << 20).pool_extent_bytes == 8 << 20
    with pytest.raises(RequestError, match=r"io\.pool_extent_bytes.*at least io\.chunk_bytes"):
        IoConfig(pool_extent_bytes=1 << 20)
