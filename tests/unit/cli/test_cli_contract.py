"""Exit codes, streams and error documents: what scripts rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megamind_ray
from megamind_ray.cli.exit_codes import exit_code_of, mark_started
from megamind_ray.cli.output import Output, error_document
from megamind_ray.errors import (
    CapacityError,
    ClusterError,
    IntegrityError,
    MegamindError,
    RequestError,
    SourceError,
)

ROOT = Path(__file__).parents[3]
COMMANDS = (
    *("inspect", "plan", "load", "replay", "timeline", "verify", "models", "unload", "drain", "topology", "tune"),
    "down",
)
FULL = CapacityError("GPU n0:0: too small", where="GPU n0:0", needed_bytes=3, free_bytes=1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("tp=0"), 2),
        (FULL, 2),
        (IntegrityError("wrong bytes", file="a"), 1),
        (SourceError("no answer", file="a"), 1),
        (ClusterError("no answer"), 1),
        (MegamindError("other"), 1),
    ],
)
def test_each_error_class_has_its_exit_code(error: MegamindError, code: int) -> None:
    assert exit_code_of(error) == code


def test_memory_that_runs_out_while_bytes_move_is_a_failure() -> None:
    error = CapacityError("GPU n0:0: out of memory", where="GPU n0:0", needed_bytes=3, free_bytes=1)
    mark_started(error)

    assert exit_code_of(error) == 1


def test_an_error_document_has_the_errors_attributes() -> None:
    document = error_document(FULL, 2)

    assert document == {
        "error": {
            "class": "CapacityError",
            "message": "GPU n0:0: too small",
            "fields": {"where": "GPU n0:0", "needed_bytes": 3, "free_bytes": 1, "missing_bytes": 2},
            "exit_code": 2,
        }
    }


def test_an_error_that_a_library_wrapped_keeps_its_own_name() -> None:
    class RayTaskError(IntegrityError):
        """As Ray makes them for errors that cross from an actor."""

    assert error_document(RayTaskError("wrong", file="a"), 1)["error"]["class"] == "IntegrityError"


@pytest.mark.parametrize("start", ["from megamind_ray.cli import main\nsys.exit(main(['--version']))", "-m"])
def test_ctrl_c_while_the_commands_are_imported_is_quiet(tmp_path: Path, start: str) -> None:
    hook = "import sys\nclass Hook:\n    def find_spec(self, name, *_):\n        if name == 'typer':\n"
    hook += "            raise KeyboardInterrupt\nsys.meta_path.insert(0, Hook())\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    argv = ["-m", "megamind_ray.cli", "--version"] if start == "-m" else ["-c", f"import sys\n{start}"]

    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_error_is_one_block_on_stderr_and_nothing_on_stdout(megamind: Any) -> None:
    result = megamind("inspect", "/no/such/place")

    assert result.code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("megamind: RequestError: /no/such/place")
    assert "Traceback" not in result.stderr


def test_an_error_is_one_document_with_json(megamind: Any) -> None:
    result = megamind("inspect", "/no/such/place", "--json")

    assert result.document["error"]["class"] == "RequestError"
    assert result.document["error"]["exit_code"] == result.code == 2


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "x", "--tp", "two"),
        ("plan", "x", "--no-such-option"),
        ("inspect",),
        ("unload",),
        ("drain",),
        ("drain", "n1", "--wait", "soon"),
        ("explode",),
        ("inspect", "a", "b"),
    ],
)
def test_mistakes_in_arguments_exit_with_2(megamind: Any, argv: tuple[str, ...]) -> None:
    result = megamind(*argv)

    assert result.code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


def test_a_drain_is_forced_or_taken_back(megamind: Any) -> None:
    result = megamind("drain", "n1", "--force", "--cancel")

    assert result.code == 2
    assert "--cancel and --force: give one of them" in result.stderr


def test_a_mistake_in_arguments_is_a_document_too(megamind: Any) -> None:
    result = megamind("plan", "x", "--tp", "two", "--json")

    assert result.code == 2
    assert "--tp" in result.document["error"]["message"]


def test_a_mesh_that_cannot_be_is_a_wrong_request(megamind: Any, checkpoint: Path) -> None:
    result = megamind("plan", checkpoint, "--tp", "2", "--ep", "3", "--json")

    assert result.code == 2
    assert "ep=3" in result.document["error"]["message"]


def test_a_bug_is_a_document_with_its_trace_on_stderr(megamind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("megamind_ray.io.open_manifest", broken)

    result = megamind("inspect", "x", "--json")

    assert result.code == 1
    assert result.document["error"]["class"] == "ZeroDivisionError"
    assert "Traceback" in result.stderr


def test_an_interrupt_exits_with_130(megamind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megamind_ray.io.open_manifest", interrupted)

    result = megamind("inspect", "x", "--json")

    assert result.code == 130
    assert result.document["error"]["class"] == "KeyboardInterrupt"


def test_what_others_print_meanwhile_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(as_json=True) as output:
        print("a worker says hello")
        output.emit({"answer": 42}, "forty-two")

    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"answer": 42}
    assert captured.err == "a worker says hello\n"


def test_a_command_that_fails_prints_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        with Output(as_json=True) as output:
            output.emit({"answer": 42}, "forty-two")
            raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        command()

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(megamind: Any, command: str) -> None:
    result = megamind(command, "--help")

    assert result.code == 0
    assert "Examples:" in result.stdout
    assert f"  megamind {command}" in result.stdout
    assert "--json" in result.stdout


def test_the_version_is_printed(megamind: Any) -> None:
    assert megamind("--version").stdout == f"megamind {megamind_ray.__version__}\n"


def test_help_names_every_command_and_the_exit_codes(megamind: Any) -> None:
    result = megamind("--help")

    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)
    assert "130 interrupted" in " ".join(result.stdout.split())


@pytest.mark.parametrize("argv", [("models",), ("unload", "tiny"), ("drain", "n1"), ("down",)])
def test_asking_about_a_fleet_starts_no_cluster(
    megamind: Any, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr("megamind_ray.actors.connection.find_cluster", lambda *_, **__: None)

    result = megamind(*argv, "--json")

    assert result.code == 2
    assert "no Ray cluster runs" in result.document["error"]["message"]


def test_inspect_and_plan_need_neither_torch_nor_ray(checkpoint: Path) -> None:
    code = (
        "import sys\nfrom megamind_ray.cli import main\n"
        f"assert main(['inspect', {str(checkpoint)!r}]) == 0\n"
        f"assert main(['plan', {str(checkpoint)!r}, '--tp', '2']) == 0\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_reader_that_goes_away_causes_no_traceback(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "megamind_ray.cli", "inspect", str(checkpoint), "--tensors"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()

    assert process.returncode == 1
    assert "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    code = (
        "import sys, threading\nfrom megamind_ray.cli import main\nimport megamind_ray.io\n"
        "def hang(*_, **__):\n"
        f"    open({str(fifo)!r}, 'w').close()\n"
        "    threading.Event().wait()\n"
        "megamind_ray.io.open_manifest = hang\n"
        "sys.exit(main(['verify', 'x', '--json']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        fifo.read_text()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert json.loads(stdout)["error"]["class"] == "KeyboardInterrupt"
