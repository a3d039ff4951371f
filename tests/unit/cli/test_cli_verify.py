from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def flip_bit(path: Path, offset: int) -> None:
    """Changes one bit in place, and nothing that the file system tells of the file."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_recorded_bytes_are_found_unchanged(megamind: Any, checkpoint: Path) -> None:
    recorded = megamind("verify", "--record", checkpoint)
    checked = megamind("verify", checkpoint)

    assert (recorded.code, checked.code) == (0, 0), recorded.stderr + checked.stderr
    assert (checkpoint / "megamind-checksums.json").exists()
    assert "every byte is as recorded" in checked.stdout


def test_a_flipped_bit_is_found_and_named(megamind: Any, checkpoint: Path) -> None:
    megamind("verify", "--record", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint)

    assert result.code == 1
    assert "model.safetensors" in result.stdout
    assert "NOT as recorded" in result.stdout


def test_a_flipped_bit_is_in_the_document(megamind: Any, checkpoint: Path) -> None:
    megamind("verify", "--record", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint, "--json")

    assert result.code == 1
    assert result.document["ok"] is False
    (mismatch,) = result.document["mismatches"]
    assert mismatch["expected_crc32"] != mismatch["actual_crc32"]
    assert len(mismatch["tensors"]) == 12


def test_a_flipped_bit_of_a_header_is_an_integrity_error(megamind: Any, checkpoint: Path) -> None:
    megamind("verify", "--record", checkpoint)
    flip_bit(checkpoint / "model.safetensors", 20)

    result = megamind("verify", checkpoint, "--json")

    assert result.code == 1
    assert result.document["error"]["class"] == "IntegrityError"
    assert result.document["error"]["fields"]["file"].endswith("model.safetensors")


def test_without_a_recording_it_says_what_it_cannot_check(megamind: Any, checkpoint: Path) -> None:
    result = megamind("verify", checkpoint, "--json")

    assert result.code == 2
    assert "no checksums were recorded" in result.document["error"]["message"]
    assert "--record" in result.document["error"]["message"]


def test_a_recording_may_lie_elsewhere(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    sidecar = tmp_path / "sums.json"

    recorded = megamind("verify", "--record", checkpoint, "--sidecar", sidecar, "--json")
    checked = megamind("verify", checkpoint, "--sidecar", sidecar, "--json")

    assert recorded.document["recorded"] == str(sidecar)
    assert checked.document["ok"] is True
    assert not (checkpoint / "megamind-checksums.json").exists()


def test_recording_again_accepts_the_bytes_as_they_are_now(megamind: Any, checkpoint: Path) -> None:
    megamind("verify", "--record", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)

    assert megamind("verify", "--record", checkpoint).code == 0
    assert megamind("verify", checkpoint).code == 0
