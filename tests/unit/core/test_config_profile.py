"""Where the profile is looked for, what goes before it, and when it is not used."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from megamind_ray.config import (
    Config,
    IoConfig,
    find_profile,
    load_config,
    profile_path,
    setting_origins,
    this_machine,
)
from megamind_ray.core.profile import Measured, Profile, parse_profile, render_profile
from megamind_ray.errors import RequestError

MEASURED = Measured(date="2026-01-31T12:00:00+00:00", path="/models/llama", file_system="ext4", device="/dev/vda")
EIGHT_THREADS = {"io": {"read_threads": 8}}


def profile(settings: Mapping[str, Mapping[str, object]] = EIGHT_THREADS, **machine: object) -> str:
    here = dataclasses.replace(this_machine(), **machine)  # type: ignore[arg-type]
    return render_profile(Profile(machine=here, measured=MEASURED, settings=settings))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config/megamind-ray").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def file(home: Path) -> Path:
    """Where the profile of a user with this home is."""
    return home / ".config/megamind-ray/profile.toml"


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home)}


def test_the_profile_of_this_machine_is_used(file: Path, environ: dict[str, str]) -> None:
    file.write_text(profile())

    assert load_config(environ=environ).io == IoConfig(read_threads=8)
    assert find_profile(environ).state == "in force"


def test_the_folder_for_configuration_goes_before_the_home(tmp_path: Path, environ: dict[str, str]) -> None:
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "settings")

    assert profile_path(environ) == tmp_path / "settings/megamind-ray/profile.toml"


def test_a_relative_folder_for_configuration_is_ignored_as_its_specification_says(file: Path, home: Path) -> None:
    assert profile_path({"HOME": str(home), "XDG_CONFIG_HOME": "settings"}) == file


def test_a_variable_names_another_file(tmp_path: Path, file: Path, environ: dict[str, str]) -> None:
    file.write_text(profile({"io": {"read_threads": 2}}))
    other = tmp_path / "mine.toml"
    other.write_text(profile())

    assert load_config(environ={**environ, "MEGAMIND_PROFILE": str(other)}).io.read_threads == 8


def test_a_variable_switches_it_off(file: Path, environ: dict[str, str]) -> None:
    file.write_text("not even TOML [")
    environ["MEGAMIND_PROFILE"] = "off"

    assert load_config(environ=environ) == Config()
    assert find_profile(environ).state == "off"


def test_the_test_suite_runs_without_the_profile_of_whoever_runs_it() -> None:
    assert os.environ["MEGAMIND_PROFILE"] == "off"


def test_settings_for_other_machines_are_made_without_it(file: Path, environ: dict[str, str]) -> None:
    file.write_text("not even TOML [")

    assert load_config(environ=environ, profile=False) == Config()


def test_everything_the_user_says_goes_before_it(tmp_path: Path, file: Path, environ: dict[str, str]) -> None:
    tuned = {"read_threads": 8, "direct": "always", "chunk_bytes": 4 << 20, "extent_bytes": 64 << 20}
    file.write_text(profile({"io": tuned}))
    toml = tmp_path / "config.toml"
    toml.write_text("[io]\nread_threads = 3\ndirect = 'never'\nchunk_bytes = '1MiB'\n")
    environ |= {"MEGAMIND_IO_DIRECT": "auto", "MEGAMIND_IO_CHUNK_BYTES": "2MiB"}

    config = load_config(toml, {"io": {"chunk_bytes": "16MiB"}}, environ)

    assert config.io == IoConfig(read_threads=3, direct="auto", chunk_bytes=16 << 20, extent_bytes=64 << 20)


def test_each_value_says_where_it_comes_from(tmp_path: Path, file: Path, environ: dict[str, str]) -> None:
    file.write_text(profile({"io": {"read_threads": 8, "direct": "always"}}))
    toml = tmp_path / "config.toml"
    toml.write_text("[retry]\nattempts = 2\n")
    environ["MEGAMIND_IO_DIRECT"] = "never"

    origins = setting_origins(toml, environ)

    assert origins["io.read_threads"] == f"profile {file}"
    assert origins["io.direct"] == "environment"
    assert origins["retry.attempts"] == f"file {toml}"
    assert origins["io.chunk_bytes"] == "default"
    assert set(origins) == {
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(getattr(Config(), section.name))
    }


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"hostname": "n17"}, "it was measured on n17, this is"),
        ({"cpus": 4096}, "it was measured with 4096 processors"),
        ({"release": "0.0.1"}, "it was measured with release 0.0.1"),
    ],
)
def test_a_profile_of_another_machine_is_not_used_and_it_says_so_once(
    file: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture, other: dict[str, object], reason: str
) -> None:
    file.write_text(profile(**other))

    with caplog.at_level(logging.WARNING):
        configs = [load_config(environ=environ) for _ in range(3)]

    assert configs == [Config()] * 3
    (note,) = caplog.messages
    assert reason in note
    assert str(file) in note
    assert "\n" not in note


def test_a_profile_of_another_schema_is_not_used(
    file: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("schema = 2\nwhatever = 'a later release writes'\n")

    with caplog.at_level(logging.WARNING):
        config = load_config(environ=environ)

    assert config == Config()
    assert "it has schema 2, this release reads schema 1" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not even TOML [", "Expected"),
        ("", "no number `schema`"),
        ("schema = true", "no number `schema`"),
        ("schema = 1", "no table `machine`"),
        (profile().replace("cpus = ", "cpus = -"), "`machine.cpus` must be a number"),
        (profile().replace("hostname = ", "host = "), "`machine.hostname` must be a text"),
        (profile() + "[more]\n", "an entry 'more'"),
        (profile() + "threads = 8\n", "no setting io.threads"),
        (profile({"disk": {"threads": 8}}), "no section 'disk'"),
        (profile({"io": {"read_threads": 0}}), "io.read_threads = 0"),
        (profile().replace("[settings.io]\n", "[settings]\n"), "one table for each section"),
    ],
)
def test_a_broken_profile_is_an_error_with_its_remedy(
    file: Path, environ: dict[str, str], text: str, problem: str
) -> None:
    file.write_text(text)

    with pytest.raises(RequestError) as caught:
        load_config(environ=environ)

    assert problem in str(caught.value)
    assert str(file) in str(caught.value)
    assert "megamind tune --reset" in str(caught.value)


def test_a_file_that_a_variable_names_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.toml: cannot be read"):
        load_config(environ={"MEGAMIND_PROFILE": str(tmp_path / "none.toml")})


def test_a_home_that_is_no_folder_has_no_profile(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert find_profile({"HOME": str(tmp_path / "file")}).state == "absent"


def test_a_user_who_sets_what_cannot_go_with_it_gets_what_was_set(
    file: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(profile({"io": {"extent_bytes": 16 << 20}}))
    environ["MEGAMIND_IO_CHUNK_BYTES"] = "32MiB"

    with caplog.at_level(logging.WARNING):
        config = load_config(environ=environ)

    assert config.io == IoConfig(chunk_bytes=32 << 20)
    assert setting_origins(environ=environ)["io.extent_bytes"] == "default"
    assert "cannot be joined" in caplog.text


def test_what_is_written_is_what_is_read() -> None:
    measured = dataclasses.replace(MEASURED, path='/mod els/\x7f"\\\udcff\U0001f999\n')
    settings = {"io": {"read_threads": 8, "direct": "never"}, "routing": {"force_pool": True}}
    written = Profile(
        machine=this_machine(), measured=measured, settings=settings, gains={"io.read_threads": "1.2x\n[settings.pool]"}
    )

    read = parse_profile(render_profile(written), "profile.toml")

    assert read.machine == written.machine
    assert read.settings == settings
    assert read.measured is not None
    assert read.measured.path == '/mod els/\x7f"\\\\udcff\U0001f999\n'


def test_a_profile_without_a_setting_says_that_the_defaults_were_the_best(file: Path, environ: dict[str, str]) -> None:
    file.write_text(profile({}))

    assert "No setting was faster" in file.read_text()
    assert load_config(environ=environ) == Config()
    assert find_profile(environ).state == "in force"


@pytest.mark.parametrize("word", ["off", "OFF", "Off"])
def test_off_is_written_in_any_way(file: Path, environ: dict[str, str], word: str) -> None:
    file.write_text(profile())
    environ["MEGAMIND_PROFILE"] = word

    assert find_profile(environ).state == "off"
    assert profile_path(environ) == file
    assert load_config(environ=environ) == Config()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_pipe_in_place_of_a_profile_is_not_waited_for(file: Path, environ: dict[str, str], is_named: bool) -> None:
    os.mkfifo(file)
    if is_named:
        environ["MEGAMIND_PROFILE"] = str(file)

    with pytest.raises(RequestError, match="it is not a regular file"):
        load_config(environ=environ)
