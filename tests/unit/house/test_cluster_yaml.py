"""cluster.yaml: what Ray's own validator finds, and what it does not look at."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

ROOT = Path(__file__).parents[3]
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def start_command(cluster: dict[str, Any], section: str) -> str:
    """The shell command with ``ray start`` of the head or the workers."""
    (command,) = [line for line in cluster[section] if "ray start" in line]
    return command


def start_arguments(command: str) -> list[str]:
    words = shlex.split(command)
    at = next(index for index in range(len(words) - 1) if words[index : index + 2] == ["ray", "start"])
    return words[at + 2 :]


def start_options(command: str) -> dict[str, Any]:
    """The options of a ``ray start``, as Ray's own command line parses them; an unknown one raises."""
    from ray.scripts.scripts import start

    options, rest, _ = start.make_parser(click.Context(start)).parse_args(start_arguments(command))
    assert rest == []
    return options


def test_rays_validator_accepts_it(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


@pytest.mark.parametrize("section", STARTS)
def test_each_start_exports_token_authentication_before_it(cluster: dict[str, Any], section: str) -> None:
    before, _, _ = start_command(cluster, section).partition("ray start")
    exported = before.partition(";")[0]

    assert exported.startswith("export ")
    assert "RAY_AUTH_MODE=token" in shlex.split(exported)


def test_the_token_file_reaches_all_nodes_and_is_private(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "chmod 600 ~/.ray/auth_token" in cluster["setup_commands"]


@pytest.mark.parametrize("section", STARTS)
def test_every_flag_is_one_of_ray_start(cluster: dict[str, Any], section: str) -> None:
    assert start_options(start_command(cluster, section))


def test_a_mistyped_flag_would_be_found() -> None:
    with pytest.raises(click.NoSuchOption):
        start_options("ray start --head --object-store-memmory=1")


def test_the_dashboard_listens_on_the_head_itself_only(cluster: dict[str, Any]) -> None:
    options = start_options(start_command(cluster, "head_start_ray_commands"))

    assert options["dashboard_host"] == "127.0.0.1"
    assert "dashboard_host" not in start_options(start_command(cluster, "worker_start_ray_commands"))


@pytest.mark.parametrize("section", STARTS)
def test_shared_memory_is_checked_for_the_size_of_the_object_store(cluster: dict[str, Any], section: str) -> None:
    pool_bytes = start_options(start_command(cluster, section))["object_store_memory"]
    before = cluster[section][: cluster[section].index(start_command(cluster, section))]
    (check,) = [line for line in before if "/dev/shm" in line]

    assert f"-ge {pool_bytes}" in " ".join(check.split())
    assert "exit 1" in check


@pytest.mark.parametrize("section", STARTS)
def test_a_cut_of_five_seconds_does_not_kill_a_node(cluster: dict[str, Any], section: str) -> None:
    words = dict(word.split("=", 1) for word in shlex.split(start_command(cluster, section).split(";")[0])[1:])
    per_check_s = (int(words["RAY_health_check_period_ms"]) + int(words["RAY_health_check_timeout_ms"])) / 1000
    noticed_s = per_check_s * int(words["RAY_health_check_failure_threshold"])

    assert 5 + per_check_s < noticed_s <= 10


def test_workers_join_the_head_and_the_head_serves_jobs(cluster: dict[str, Any]) -> None:
    head = start_options(start_command(cluster, "head_start_ray_commands"))
    worker = start_options(start_command(cluster, "worker_start_ray_commands"))

    assert head["head"] is True
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"
    assert "$HOME/megamind-venv/bin:" in start_command(cluster, "head_start_ray_commands")
