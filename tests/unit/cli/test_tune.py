"""``megamind tune``, with measurements of a few hundred milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import megamind_ray as mm
from megamind_ray.config import load_config
from megamind_ray.engine.tune_search import Values
from megamind_ray.units import MIB

ROOT = Path(__file__).parents[3]
# No candidate that needs a larger sample is measured, and there is no time for the others.
SHORT = ("--seconds", "1", "--bytes", "8MiB")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profile of a user who has none yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("MEGAMIND_PROFILE")
    return tmp_path / "settings/megamind-ray/profile.toml"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.ones(9 * MIB, np.uint8)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def direct_is_twice_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a machine where nothing but ``direct`` makes a difference."""

    def seconds(_meter: object, values: Values, _condition: str) -> float:
        return 0.001 if values["io.direct"] == "always" else 0.002

    monkeypatch.setattr("megamind_ray.engine.tune_reads.ReadMeter.measure", seconds)


@pytest.mark.usefixtures("direct_is_twice_as_fast")
def test_what_is_faster_is_written_and_loaded_by_later_runs(megamind: Any, file: Path, scratch: Path) -> None:
    result = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB")

    assert result.code == 0, result.stderr
    assert "faster than the defaults: io.direct = always" in result.stdout
    assert f"profile written to {file}" in result.stdout
    assert 'direct = "always"  # 2.00x warm' in file.read_text()
    assert load_config().io.direct == "always"
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("direct_is_twice_as_fast", "file")
def test_the_document_has_all_samples(megamind: Any, scratch: Path) -> None:
    result = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB", "--json")

    document = result.document
    assert document["changes"] == {"io.direct": "always"}
    (taken,) = [trial for trial in document["trials"] if trial["verdict"] == "taken"]
    assert taken["samples_s"]["warm"] == [[0.002, 0.001]] * 7
    assert document["comparison"]["better"] is True
    assert document["comparison"]["samples_s"]["warm"] == [[0.002, 0.001]] * 21
    assert document["measured"]["path"] == str(scratch)


@pytest.mark.usefixtures("direct_is_twice_as_fast")
def test_a_dry_run_writes_no_profile(megamind: Any, file: Path, scratch: Path) -> None:
    result = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB", "--dry-run", "--json")

    assert result.document["changes"] == {"io.direct": "always"}
    assert result.document["profile"] is None
    assert not file.exists()


@pytest.mark.usefixtures("direct_is_twice_as_fast")
def test_what_does_not_hold_when_measured_again_is_not_used(
    megamind: Any, file: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megamind_ray.engine import tune_search

    def slower(*_: object, **__: object) -> tune_search.Comparison:
        pairs = {"warm": [tune_search.Pair(0.97, 1.0)] * 7}
        return tune_search.Comparison(pairs=pairs, better=False, reason="0.97x warm: slower warm")

    monkeypatch.setattr("megamind_ray.engine.tune.compare", slower)

    result = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB")

    assert "the defaults are kept: what looked faster did not hold (0.97x warm: slower warm)" in result.stdout
    assert "No setting was faster" in file.read_text()


def test_real_reads_of_a_checkpoint_end_with_a_profile_that_is_valid(megamind: Any, file: Path, model: Path) -> None:
    result = megamind("tune", model, *SHORT, "--json")

    assert result.code == 0, result.stderr
    document = result.document
    assert document["sample_bytes"] == 8 * MIB
    assert any("copies to" in note for note in document["notes"])
    assert document["measured"]["path"] == str(model)
    assert load_config().io == load_config(overrides={"io": _fields(document["tuned"])}, profile=False).io
    assert json.dumps(document["changes"]) == "{}" or document["comparison"]["better"]


def _fields(values: dict[str, object]) -> dict[str, object]:
    return {name.removeprefix("io."): value for name, value in values.items()}


@pytest.mark.usefixtures("file")
def test_recorded_checksums_bring_their_own_chunks(megamind: Any, model: Path) -> None:
    megamind("verify", "--record", model)

    result = megamind("tune", model, *SHORT, "--dry-run", "--json")

    assert any("io.chunk_bytes was not measured" in note for note in result.document["notes"])
    assert "io.chunk_bytes" not in {trial["setting"] for trial in result.document["trials"]}


@pytest.mark.usefixtures("file", "direct_is_twice_as_fast")
def test_what_goes_before_the_profile_is_told(
    megamind: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMIND_IO_DIRECT", "never")
    elsewhere = tmp_path / "mine.toml"

    result = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB", "--output", elsewhere)

    assert "note: io.direct is set by environment, which goes before the profile" in result.stdout
    assert f"note: MEGAMIND_PROFILE={elsewhere} makes later runs use the profile" in result.stdout
    assert elsewhere.exists()


@pytest.mark.usefixtures("direct_is_twice_as_fast")
def test_show_says_where_each_value_comes_from(megamind: Any, file: Path, scratch: Path) -> None:
    before = megamind("tune", "--show")
    megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB")
    after = megamind("tune", "--show", "--json").document

    assert f"profile: none; `megamind tune` writes {file}" in before.stdout
    origins = {item["name"]: (item["value"], item["origin"]) for item in after["settings"]}
    assert origins["io.direct"] == ("always", f"profile {file}")
    assert origins["io.read_threads"] == (8, "default")
    assert after["profile"]["state"] == "in force"


def test_show_has_no_secrets_of_mirrors(megamind: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMIND_IO_MIRRORS", "https://ada:topsecret@h/m?sig=f00d42,s3://b/m")

    for argv in (("tune", "--show"), ("tune", "--show", "--json")):
        shown = megamind(*argv).stdout
        assert "https://***@h/m?sig=***" in shown
        assert "s3://b/m" in shown
        assert "topsecret" not in shown
        assert "f00d42" not in shown


def test_show_says_that_it_is_switched_off(megamind: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMIND_PROFILE", "off")

    assert "switched off by MEGAMIND_PROFILE=off" in megamind("tune", "--show").stdout
    assert not file.exists()


@pytest.mark.usefixtures("direct_is_twice_as_fast")
def test_a_broken_profile_can_be_removed_or_measured_anew(megamind: Any, file: Path, scratch: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("[")

    shown = megamind("tune", "--show", "--json")
    assert (shown.code, shown.document["error"]["class"]) == (2, "RequestError")

    assert megamind("tune", "--reset").stdout == f"removed {file}\n"
    assert megamind("tune", "--reset").stdout == f"there is no profile at {file}\n"

    file.write_text("[")
    assert megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB").code == 0
    assert load_config().io.direct == "always"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("s3://models/llama",), "only files of this machine are measured"),
        (("/no/such/model",), "/no/such/model"),
        (("--seconds", "0"), "take 1 second to a day"),
        (("--seconds", "nan"), "take 1 second to a day"),
        (("--bytes", "1KiB"), "too little to measure with"),
        (("--bytes", "many"), "--bytes: 'many' is not a size"),
        (("--dir", "/no/such/folder"), "name a folder that is there"),
        (("--output", "/"), "is a folder"),
        (("--show", "--reset"), "give one of them alone"),
        (("--show", "model"), "give one of them alone"),
        (("--reset", "--dry-run"), "give one of them alone"),
    ],
)
@pytest.mark.usefixtures("file")
def test_wrong_requests_are_told(
    megamind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    result = megamind("tune", *argv, "--json")

    assert result.code == 2
    assert message in result.document["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_a_file_must_be_named(megamind: Any, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "MEGAMIND_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    result = megamind("tune", "--dir", scratch, *SHORT)

    assert result.code == 2
    assert "name a file with --output" in result.stderr
    assert "no home directory to look in" in megamind("tune", "--show").stdout
    assert "there is no profile" in megamind("tune", "--reset").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_neither_checkpoint_nor_profile(
    tmp_path: Path, scratch: Path, number: signal.Signals
) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    code = (
        "import signal, sys, threading\nfrom megamind_ray.cli import main\n"
        "from megamind_ray.engine import tune_reads\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the test suite may run under nohup
        "def hang(*_, **__):\n"
        f"    open({str(fifo)!r}, 'w').close()\n"
        "    threading.Event().wait()\n"
        "tune_reads.ReadMeter.measure = hang\n"
        f"sys.exit(main(['tune', '--dir', {str(scratch)!r}, '--bytes', '8MiB', '--json']))"
    )
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "settings"), "MEGAMIND_PROFILE": ""}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        fifo.read_text()
        assert len(list(scratch.iterdir())) == 1
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert json.loads(stdout)["error"]["class"] == "KeyboardInterrupt"
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "settings").exists()


@pytest.mark.usefixtures("file", "direct_is_twice_as_fast")
def test_who_uses_the_profile_is_told(megamind: Any, scratch: Path) -> None:
    written = megamind("tune", "--dir", scratch, "--seconds", "20", "--bytes", "8MiB").stdout
    shown = " ".join(megamind("tune", "--help").stdout.split())

    assert "`megamind load`, and what else goes through a cluster, does not" in written
    assert "`megamind load`, and whatever else goes through a cluster, does not use it" in shown


def test_without_time_nothing_is_said_to_be_found_and_no_profile_is_replaced(
    megamind: Any, file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megamind_ray.engine import tune

    monkeypatch.setattr(tune, "_SEARCH_SHARE", 0.0)

    result = megamind("tune", model, *SHORT)

    assert "may not be the fastest: none of" in result.stdout
    assert "candidates were not measured: " in result.stdout
    assert "for want of time, --seconds was 1.00 s" in result.stdout
    assert f"no profile was written to {file}" in result.stdout
    assert not file.exists()


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(("max_bytes", "limit"), [("8MiB", "--bytes"), ("2GiB", "the checkpoint")])
def test_what_kept_reads_from_being_larger_is_told(
    megamind: Any, model: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: str, limit: str
) -> None:
    monkeypatch.setattr("megamind_ray.engine.tune_reads.ReadMeter._read", lambda _meter, _config: 0.002)

    result = megamind("tune", model, "--seconds", "20", "--bytes", max_bytes, "--json")

    (note,) = [note for note in result.document["notes"] if "candidates were not measured" in note]
    assert note.endswith(f"what kept them from being larger was {limit}")
    assert result.document["num_measured"] < result.document["num_candidates"]


def test_a_part_without_a_finding_is_no_profile(
    megamind: Any, file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamind_ray.engine.tune_reads.ReadMeter._read", lambda _meter, _config: 0.002)
    file.parent.mkdir(parents=True)
    file.write_text("[io]\n")

    result = megamind("tune", model, "--seconds", "20", "--bytes", "8MiB")

    assert result.code == 0
    assert "without a gain" in result.stdout
    assert f"no profile was written to {file}, as only a part was measured" in result.stdout
    assert file.read_text() == "[io]\n"


def test_what_goes_to_other_machines_is_made_without_the_profile(megamind: Any, file: Path, checkpoint: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("[")  # whoever looks at it fails

    with pytest.raises(mm.RequestError, match=r"profile .*`megamind tune --reset`"):
        mm.load_state_dict(checkpoint)
    with pytest.raises(mm.RequestError, match="no fleet"):
        mm.connect("local", fleet="no fleet")
    assert megamind("plan", checkpoint).code == 0
    assert megamind("load", checkpoint, "--report", "/no/such/folder/report.json").stderr.count("profile") == 0
    assert megamind("verify", "--record", checkpoint).code == 0
