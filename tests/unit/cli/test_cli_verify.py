from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.testing.range_server import RangeServer


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


def hub_cache(folder: Path, checkpoint: Path) -> Path:
    """The checkpoint as the hub's client leaves it: links to blobs that are named after their SHA-256."""
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    shutil.copy(checkpoint / "model.safetensors", folder / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / digest)
    return snapshot


def test_a_snapshot_of_the_hub_needs_no_recording(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = megamind("verify", hub_cache(tmp_path / "models--org--name", checkpoint))

    assert result.code == 0, result.stderr
    assert "1 of 1 file as their storage says (the name of its blob in the Hugging Face cache)" in result.stdout


def test_a_damaged_blob_is_found_and_not_recorded(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "models--org--name", checkpoint)
    flip_bit((snapshot / "model.safetensors").resolve(), -3 % (checkpoint / "model.safetensors").stat().st_size)

    checked, recorded = megamind("verify", snapshot, "--json"), megamind("verify", "--record", snapshot)

    assert checked.code == 1
    (digest,) = checked.document["digests"]
    assert (digest["algorithm"], digest["ok"]) == ("sha256", False)
    assert digest["expected"] != digest["actual"]
    assert recorded.code == 1
    assert "its checksums are not recorded" in recorded.stderr
    assert not (snapshot / "megamind-checksums.json").exists()


def test_it_tells_which_of_several_copies_is_bad(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    megamind("verify", "--record", checkpoint)
    bad = Path(shutil.copytree(checkpoint, tmp_path / "bad"))
    good = Path(shutil.copytree(checkpoint, tmp_path / "good"))
    flip_bit(bad / "model.safetensors", -3 % (bad / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint, "--mirror", bad, "--mirror", good, "--mirror", tmp_path / "none", "--json")

    assert result.code == 1
    assert result.document["ok"] is False
    assert result.document["mismatches"] == []
    copies = result.document["mirrors"]
    assert [(Path(copy["uri"]), copy["ok"]) for copy in copies] == [
        (bad, False),
        (good, True),
        (tmp_path / "none", False),
    ]
    assert copies[0]["mismatches"][0]["file"] == str(bad / "model.safetensors")
    assert "no such file" in copies[2]["error"]["message"]


def test_mirrors_are_told_in_words_too(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    megamind("verify", "--record", checkpoint)
    bad = Path(shutil.copytree(checkpoint, tmp_path / "bad"))
    flip_bit(bad / "model.safetensors", -3 % (bad / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint, "--mirror", bad, "--mirror", tmp_path / "none")

    assert result.code == 1
    assert f"{checkpoint}: every byte is as recorded" in result.stdout
    assert f"{bad}: NOT as recorded" in result.stdout
    assert f"{tmp_path / 'none'}: CANNOT be read" in result.stdout


def test_a_plain_copy_is_held_to_what_the_storage_of_a_mirror_knows(
    megamind: Any, checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = hub_cache(tmp_path / "models--org--name", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint, "--mirror", snapshot, "--json")

    assert result.code == 1
    assert [check["ok"] for check in result.document["digests"]] == [False]
    assert [copy["ok"] for copy in result.document["mirrors"]] == [True]


def cached_copies(checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two snapshots of the hub with other bytes, each as its own storage says."""
    first = hub_cache(tmp_path / "one", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)
    return first, hub_cache(tmp_path / "two", checkpoint)


def test_storages_that_contradict_each_other_are_a_conflict_of_which_neither_is_bad(
    megamind: Any, checkpoint: Path, tmp_path: Path
) -> None:
    first, second = cached_copies(checkpoint, tmp_path)

    result = megamind("verify", first, "--mirror", second)
    document = megamind("verify", first, "--mirror", second, "--json").document

    assert result.code == 1
    assert "CONFLICT" in result.stdout
    assert "NOT what its storage says" not in result.stdout
    assert [check["ok"] for copy in (document, *document["mirrors"]) for check in copy["digests"]] == [True, True]
    assert document["ok"] is False
    (conflict,) = document["conflicts"]
    assert set(conflict["values"]) == {str(first / "model.safetensors"), str(second / "model.safetensors")}


def test_a_recording_settles_a_conflict(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    first, second = cached_copies(checkpoint, tmp_path)
    megamind("verify", "--record", first)

    document = megamind("verify", first, "--mirror", second, "--json").document

    assert document["conflicts"] == []
    assert document["mismatches"] == []
    assert [len(copy["mismatches"]) for copy in document["mirrors"]] == [1]


def test_each_copy_is_held_to_its_own_storage(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    first, second = hub_cache(tmp_path / "one", checkpoint), hub_cache(tmp_path / "two", checkpoint)
    flip_bit((second / "model.safetensors").resolve(), -3 % (checkpoint / "model.safetensors").stat().st_size)

    result = megamind("verify", first, "--mirror", second)

    assert result.code == 1
    assert f"{first}: 1 of 1 file as their storage says" in result.stdout
    assert f"NOT what its storage says it is: {second}" in result.stdout


def test_what_another_storage_says_is_named_as_such(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "models--org--name", checkpoint)
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)

    result = megamind("verify", checkpoint, "--mirror", snapshot)

    assert result.code == 1
    assert f"differs from what the storage of {snapshot} says: {checkpoint}" in result.stdout
    assert "NOT what its storage says" not in result.stdout


def test_a_checkpoint_that_lacks_a_file_is_reported_and_its_mirror_checked(
    megamind: Any, checkpoint: Path, tmp_path: Path
) -> None:
    megamind("verify", "--record", checkpoint)
    good = Path(shutil.copytree(checkpoint, tmp_path / "good"))
    (good / "megamind-checksums.json").unlink()
    (checkpoint / "model.safetensors").unlink()

    result = megamind("verify", checkpoint, "--mirror", good)
    document = megamind("verify", checkpoint, "--mirror", good, "--json").document

    assert result.code == 1
    assert f"{checkpoint}: CANNOT be read" in result.stdout
    assert f"{good}: every byte is as recorded in {checkpoint}" in result.stdout
    assert document["error"]["class"] == "RequestError"
    assert [copy["ok"] for copy in document["mirrors"]] == [True]


def test_a_mirror_that_lacks_files_says_which(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    megamind("verify", "--record", checkpoint)
    short = Path(shutil.copytree(checkpoint, tmp_path / "short"))
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-1])
    (tmp_path / "empty").mkdir()

    result = megamind("verify", checkpoint, "--mirror", short, "--mirror", tmp_path / "empty")

    assert result.code == 1
    assert f"{short}: model.safetensors has {len(data) - 1:,} bytes, and {len(data):,} in the copy" in result.stdout
    assert f"{tmp_path / 'empty'}: lacks 1 of 1 files (model.safetensors): " in result.stdout


def test_a_mistyped_mirror_is_refused_before_a_load_begins(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = megamind("load", checkpoint, "--mirror", tmp_path / "none")

    assert result.code == 2
    assert f"the mirror {tmp_path / 'none'} cannot be used" in result.stderr


def test_a_mistyped_mirror_of_a_good_checkpoint_is_a_wrong_request(
    megamind: Any, checkpoint: Path, tmp_path: Path
) -> None:
    megamind("verify", "--record", checkpoint)

    assert megamind("verify", checkpoint, "--mirror", tmp_path / "none").code == 2
    flip_bit(checkpoint / "model.safetensors", -3 % (checkpoint / "model.safetensors").stat().st_size)
    assert megamind("verify", checkpoint, "--mirror", tmp_path / "none").code == 1


def test_a_recording_beside_a_mirror_is_told(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(checkpoint, tmp_path / "plain"))
    megamind("verify", "--record", checkpoint)

    result = megamind("verify", plain, "--mirror", checkpoint)

    assert result.code == 2
    assert f"one lies beside a mirror: --sidecar {checkpoint}/megamind-checksums.json" in result.stderr
    assert (
        megamind("verify", plain, "--mirror", checkpoint, "--sidecar", checkpoint / "megamind-checksums.json").code == 0
    )


def test_recording_goes_without_mirrors(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = megamind("verify", "--record", checkpoint, "--mirror", tmp_path)

    assert result.code == 2
    assert "--record goes without --mirror" in result.stderr


def test_a_mirror_of_an_unknown_kind_is_refused_before_a_load_begins(megamind: Any, checkpoint: Path) -> None:
    result = megamind("load", checkpoint, "--mirror", "ftp://host/models")

    assert result.code == 2
    assert "ftp:// is not supported" in result.stderr


def test_a_checkpoint_on_the_web_is_held_to_its_recording(megamind: Any, checkpoint: Path) -> None:
    with RangeServer(checkpoint) as server:
        before = megamind("verify", server.uri)
        megamind("verify", "--record", checkpoint)
        after = megamind("verify", server.uri, "--mirror", server.uri, "--json")

    assert before.code == 2
    assert "no checksums were recorded and its storage has none" in before.stderr
    assert (after.code, after.document["ok"], after.document["digests"]) == (0, True, [])


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_secrets_of_addresses_are_not_shown(
    megamind: Any, checkpoint: Path, tmp_path: Path, as_json: tuple[str, ...]
) -> None:
    file, sums = checkpoint / "model.safetensors", tmp_path / "sums.json"
    with RangeServer(checkpoint) as server:
        base = server.uri.replace("://", "://ada:sw@rdfish@")
        uri = f"{base}/model.safetensors?sig=f00d42"
        recorded = megamind("verify", "--record", uri, "--sidecar", sums, *as_json)
        flip_bit(file, -3 % file.stat().st_size)
        # Signed anew, as a day later.
        uri = f"{base}/model.safetensors?sig=f00d43"
        checked = megamind("verify", uri, "--sidecar", sums, "--mirror", f"{base}/none?sig=f00d42", *as_json)
        inspected = megamind("inspect", uri, "--tensors", *as_json)
        planned = megamind("plan", uri, "--explain", "model.norm.weight", "--allow-replication", *as_json)

    assert (recorded.code, checked.code, inspected.code, planned.code) == (0, 1, 0, 0)
    assert "f00d" not in sums.read_text()
    shown = "".join(result.stdout + result.stderr for result in (recorded, checked, inspected, planned))
    assert "model.safetensors?sig=***" in shown
    assert "rdfish" not in shown
    assert "f00d" not in shown
