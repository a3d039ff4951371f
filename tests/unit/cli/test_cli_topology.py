"""``megamind topology``, with measurements that are short, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.engine import measure, measure_topology
from megamind_ray.engine.measure_memory import MemoryMeter
from megamind_ray.planning import load_topology, parse_topology, preset, preset_names
from megamind_ray.units import MIB

ROOT = Path(__file__).parents[3]
SHORT = ("--seconds", "60", "--bytes", "8MiB")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, measured with a few MiB."""
    monkeypatch.setattr(measure, "MemoryMeter", lambda threads: MemoryMeter(threads, num_bytes=4 * MIB))
    monkeypatch.setattr(measure, "loopback_rate", lambda: 3e9)
    monkeypatch.setattr(measure_topology, "_num_cuda", lambda: 0)


@pytest.mark.usefixtures("small")
def test_the_file_of_this_machine_is_a_topology(megamind: Any, scratch: Path) -> None:
    result = megamind("topology", "--dir", scratch, "--gpus", "2", *SHORT)

    assert result.code == 0, result.stderr
    topology = parse_topology(result.stdout, origin="stdout")
    (node,) = topology.nodes
    assert [gpu.kind for gpu in node.gpus] == ["cpu", "cpu"]
    assert node.host.network_bytes_per_s == 3e9
    assert len(node.disks) == 1
    assert "measured by megamind topology on " in topology.source
    assert "defaults, not measured: put, call, take, links" in topology.source
    assert "#   one thread copies: " in result.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_the_document_has_the_topology_and_all_samples(megamind: Any, scratch: Path) -> None:
    document = megamind("topology", "--dir", scratch, *SHORT, "--json").document

    (node,) = document["topology"]["nodes"]
    (figures,) = document["figures"].values()
    copy = next(figure for figure in figures if figure["name"] == "one thread copies")
    assert copy["value"] == node["host"]["copy_bytes_per_s"]
    assert len(copy["samples"]) >= 3
    assert document["file"] is None
    assert list(document["notes"]) == [node["id"]]


@pytest.mark.usefixtures("small")
def test_a_file_is_written_and_can_be_planned_for(megamind: Any, scratch: Path, checkpoint: Path) -> None:
    out = scratch.parent / "here.toml"

    result = megamind("topology", "--dir", scratch, "--out", out, *SHORT)

    assert result.code == 0, result.stderr
    assert "one thread copies: " in result.stdout
    assert result.stdout.endswith(f"topology written to {out}\n")
    plan = megamind("plan", checkpoint, "--topology", out, "--json").document
    assert plan["ranks"][0]["node"] == load_topology(out).nodes[0].id


def test_a_preset_is_printed_as_it_is(megamind: Any, tmp_path: Path) -> None:
    result = megamind("topology", "--preset", "two-racks")

    assert result.code == 0, result.stderr
    assert parse_topology(result.stdout, origin="stdout") == preset("two-racks")
    assert "# each way; 900 GB/s counts both" in result.stdout
    megamind("topology", "--preset", "two-racks", "--out", tmp_path / "mine.toml")
    assert (tmp_path / "mine.toml").read_text() == result.stdout


def test_presets_are_listed_one_a_line(megamind: Any) -> None:
    lines = megamind("topology", "--list").stdout.splitlines()
    document = megamind("topology", "--list", "--json").document

    assert [line.split()[0] for line in lines[-len(preset_names()) :]] == list(preset_names())
    assert [entry["name"] for entry in document["presets"]] == list(preset_names())
    assert all(entry["source"] for entry in document["presets"])


def test_plan_takes_the_name_of_a_preset(megamind: Any, checkpoint: Path) -> None:
    plan = megamind("plan", checkpoint, "--tp", "2", "--topology", "founding", "--json").document

    assert plan["topology"] == "founding"
    assert [rank["node"] for rank in plan["ranks"]] == ["n0", "n0"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("topology", "--preset", "dgx-a10"), "no topology preset is named 'dgx-a10'; take one of 1x-rtx-4090, "),
        (("topology", "--preset", "founding", "--list"), "--cluster, --preset and --list: give one of them"),
        (("topology", "--cluster", "--list"), "--cluster, --preset and --list: give one of them"),
        (("topology", "--cluster", "--gpus", "2"), "--gpus is for measuring this machine alone; leave it out"),
        (("topology", "--gpus", "0"), "--gpus"),
        (("topology", "--seconds", "0"), "--seconds 0: take 1 second to an hour"),
        (("topology", "--bytes", "1MiB"), "--bytes 1.00 MiB: too little to measure a disk with"),
        (("topology", "--dir", "/no/such/folder"), "--dir /no/such/folder: No such file or directory"),
        (("topology", "--out", "/no/such/folder/a.toml"), "/no/such/folder is no folder that can be written to"),
        (("topology", "--out", "/"), "--out /: is a folder; give the name of a file"),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_wrong_request_is_told(megamind: Any, argv: tuple[str, ...], complaint: str) -> None:
    result = megamind(*argv, "--json")

    assert result.code == 2
    assert complaint in result.document["error"]["message"]


def test_without_a_cluster_none_is_started(megamind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamind_ray.actors.connection.find_cluster", lambda *_, **__: None)

    result = megamind("topology", "--cluster", "--json")

    assert result.code == 2
    assert "no Ray cluster runs" in result.document["error"]["message"]


def test_help_shows_examples(megamind: Any) -> None:
    result = megamind("topology", "--help")

    assert result.code == 0
    assert "  megamind topology --preset hgx-h100 > mine.toml" in result.stdout


def test_presets_need_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom megamind_ray.cli import main\n"
        "assert main(['topology', '--list']) == 0\n"
        "assert main(['topology', '--preset', 'founding']) == 0\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_neither_a_temporary_file_nor_a_topology(
    tmp_path: Path, scratch: Path, number: signal.Signals
) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    out = tmp_path / "here.toml"
    code = (
        "import sys, threading\nfrom megamind_ray.cli import main\n"
        "from megamind_ray.engine import measure, measure_disk, measure_memory\n"
        "measure.MemoryMeter = lambda threads: measure_memory.MemoryMeter(threads, num_bytes=4 << 20)\n"
        "def hang(*_, **__):\n"
        f"    open({str(fifo)!r}, 'w').close()\n"
        "    threading.Event().wait()\n"
        "measure_disk.DiskMeter.rate = hang\n"
        f"sys.exit(main(['topology', '--dir', {str(scratch)!r}, '--out', {str(out)!r}, '--bytes', '8MiB', '--json']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        fifo.read_text()
        assert len(list(scratch.iterdir())) == 1
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert json.loads(stdout)["error"]["class"] == "KeyboardInterrupt"
    assert list(scratch.iterdir()) == []
    assert not out.exists()
