"""What can be wrong with a checkpoint or a request, one row each: the error's class, and what its text names.

Every row is shown to ``inspect`` or ``plan``, to ``load_state_dict`` where it is about the checkpoint, and to the
command line, which must exit with the code of the class and print the error as its one document.

Rows that need more than one process are shown elsewhere:

- no permission: ``unit/io/test_refused_checkpoints.py`` (a process without privileges)
- a file that changes between plan and read: ``test_changing_files.py`` and ``ray/test_bad_input_through_ray.py``
- /dev/shm smaller than the pool, or full: ``test_pool_on_tmpfs.py`` and ``ray/test_bad_input_through_ray.py``
- more ranks than GPUs, tp against heads, another release's planner: ``ray/test_load_through_ray.py``
- an interrupt in the middle: ``ray/test_real_head.py``
- a node that is drained: ``unit/actors/test_departures.py``, ``cluster/test_elastic.py``
- lost links, and what is no file in the place of one: ``unit/io/test_hub_cache_layout.py``, ``unit/io/test_sidecar.py``
- buckets: ``unit/io/test_s3_sources.py``; mirrors: ``unit/io/test_copies.py``
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.errors import CapacityError, IntegrityError, MegamindError, RequestError
from megamind_ray.testing.handmade import LLAMA_SHAPES, entries, framed, write_llama, write_weights

INDEX = "model.safetensors.index.json"
ONE = {"w": (4,)}


def header_file(folder: Path, header: object, data: bytes = b"1234", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(framed(raw, data, length=length))
    return path


def changed_entry(folder: Path, **fields: object) -> Path:
    return header_file(folder, {"w": {**entries(ONE)["w"], **fields}})


def two_tensors(folder: Path, first: list[int], second: list[int], data: bytes = b"12345678") -> Path:
    ranges = {"a": first, "b": second}
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in ranges.items()
    }
    return header_file(folder, header, data)


def indexed(folder: Path, weight_map: dict[str, str]) -> Path:
    write_weights(folder / "model.safetensors", ONE)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def truncated(folder: Path) -> Path:
    path = write_weights(folder / "model.safetensors", ONE)
    os.truncate(path, path.stat().st_size - 1)
    return path


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder / "exploded"),)


def pickles(folder: Path) -> Path:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder)))
    return folder


def linked_out(folder: Path) -> Path:
    target = write_weights(folder / "elsewhere" / "w.safetensors", ONE)
    (folder / "model").mkdir()
    (folder / "model" / "w.safetensors").symlink_to(target)
    return folder / "model"


def piped(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder / "model.safetensors"


@dataclass(frozen=True)
class Row:
    """One thing that is wrong.

    Attributes:
        make: Makes the broken checkpoint in a folder and returns what the user would give.
        error: Class.
        names: Texts that the message must have; ``{folder}`` stands for the folder.
    """

    make: Callable[[Path], Path]
    error: type[MegamindError]
    names: tuple[str, ...]


GOOD = entries(ONE)["w"]
ROWS = {
    "header longer than the file": Row(
        lambda f: header_file(f, b"{}", b"", length=1000), IntegrityError, ("model.safetensors", "1008", "truncated")
    ),
    "header over 100 MB": Row(
        lambda f: header_file(f, b"{}", length=100_000_001), IntegrityError, ("model.safetensors", "100000001")
    ),
    "header that is not JSON": Row(
        lambda f: header_file(f, b"{nonsense"), IntegrityError, ("model.safetensors", "not valid JSON")
    ),
    "offsets that overlap": Row(
        lambda f: two_tensors(f, [0, 5], [4, 8]), IntegrityError, ("model.safetensors", "'b'", "overlaps 'a'")
    ),
    "offsets that leave a hole": Row(
        lambda f: two_tensors(f, [0, 3], [4, 8]), IntegrityError, ("model.safetensors", "'b'", "hole of 1 bytes")
    ),
    "offsets past the end of the file": Row(
        lambda f: two_tensors(f, [0, 4], [4, 9]), IntegrityError, ("model.safetensors", "'b'", "past the end")
    ),
    "offsets that disagree with dtype and shape": Row(
        lambda f: changed_entry(f, shape=[3]), IntegrityError, ("model.safetensors", "'w'", "need 3 bytes", "have 4")
    ),
    "tensor name twice in a header": Row(
        lambda f: header_file(f, b'{"w": %b, "w": %b}' % ((json.dumps(GOOD).encode(),) * 2)),
        IntegrityError,
        ("model.safetensors", "'w' occurs twice"),
    ),
    "unknown dtype": Row(
        lambda f: changed_entry(f, dtype="F7"), IntegrityError, ("model.safetensors", "'w'", "dtype 'F7'")
    ),
    "index that names a missing file": Row(
        lambda f: indexed(f, {"w": "model.safetensors", "x": "gone.safetensors"}),
        RequestError,
        (INDEX, "gone.safetensors"),
    ),
    "index that names a missing tensor": Row(
        lambda f: indexed(f, {"w": "model.safetensors", "x": "model.safetensors"}), IntegrityError, (INDEX, "'x'")
    ),
    "index that escapes the folder by ..": Row(
        lambda f: indexed(f, {"w": "../x.safetensors"}), RequestError, (INDEX, "'w'", "'../x.safetensors'")
    ),
    "index that escapes the folder by an absolute path": Row(
        lambda f: indexed(f, {"w": "/etc/x.safetensors"}), RequestError, (INDEX, "'w'", "'/etc/x.safetensors'")
    ),
    "index with a list in place of a file": Row(
        lambda f: indexed(f, {"w": ["model.safetensors"]}),
        IntegrityError,
        (INDEX, "'w'", "is not the name of a file"),
    ),
    "link out of the folder": Row(linked_out, RequestError, ("model/w.safetensors", "elsewhere/w.safetensors")),
    "truncated file": Row(truncated, IntegrityError, ("model.safetensors", "'w'", "truncated")),
    "folder with pickle files only": Row(pickles, RequestError, ("{folder}", "pytorch_model.bin", "save_file")),
    "empty folder": Row(lambda f: f, RequestError, ("{folder}", "empty")),
    "no such path": Row(lambda f: f / "nowhere", RequestError, ("{folder}/nowhere", "no such file or folder")),
    "a pipe": Row(piped, RequestError, ("model.safetensors", "neither a file nor a folder")),
    "a device": Row(lambda f: Path("/dev/zero"), RequestError, ("/dev/zero", "neither a file nor a folder")),
    "a folder named as a file": Row(
        lambda f: (f / "model.safetensors").mkdir() or f / "model.safetensors",
        RequestError,
        ("model.safetensors", "empty"),
    ),
    "an empty tensor of an impossible shape": Row(
        lambda f: header_file(f, {"w": {"dtype": "U8", "shape": [2**64 - 1, 0], "data_offsets": [0, 0]}}, b""),
        IntegrityError,
        ("model.safetensors", "'w'", "shape"),
    ),
}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
EXIT_CODES = {RequestError: 2, CapacityError: 2, IntegrityError: 1}


def assert_names(message: str, row: Row, folder: Path) -> None:
    for name in row.names:
        assert name.format(folder=folder) in message
    assert len(message) < 1500


@each_row
def test_inspecting_it_raises_the_class_and_names_the_culprit(tmp_path: Path, row: Row) -> None:
    uri = row.make(tmp_path)

    with pytest.raises(row.error) as caught:
        mm.inspect(uri)

    assert type(caught.value) is row.error
    assert_names(str(caught.value), row, tmp_path)


@each_row
def test_loading_it_raises_the_same_and_gives_nothing(tmp_path: Path, row: Row) -> None:
    uri = row.make(tmp_path)

    with pytest.raises(row.error) as caught:
        mm.load_state_dict(uri)

    assert_names(str(caught.value), row, tmp_path)


@each_row
@pytest.mark.parametrize("command", ["inspect", "plan", "verify"])
def test_the_command_line_exits_with_its_code_and_one_document(
    tmp_path: Path, megamind: Any, row: Row, command: str
) -> None:
    answer = megamind(command, row.make(tmp_path))

    assert answer.code == EXIT_CODES[row.error]
    assert answer.document["error"]["class"] == row.error.__name__
    assert answer.document["error"]["exit_code"] == answer.code
    assert_names(answer.document["error"]["message"], row, tmp_path)
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("load", [mm.inspect, mm.load_state_dict, mm.load_file, mm.plan])
@pytest.mark.parametrize("path", ["", "pytorch_model.bin"], ids=["the folder", "the file"])
def test_a_pickle_is_never_executed(tmp_path: Path, load: Callable[[Path], object], path: str) -> None:
    folder = pickles(tmp_path)

    with pytest.raises(RequestError, match=r"pickle files .* can run any code"):
        load(folder / path)

    assert not (folder / "exploded").exists()


def test_the_bomb_of_these_tests_would_go_off(tmp_path: Path) -> None:
    pickle.loads((pickles(tmp_path) / "pytorch_model.bin").read_bytes())

    assert (tmp_path / "exploded").exists()


def test_the_links_of_a_hugging_face_cache_are_no_escape(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    write_weights(model / "blobs" / "0a1b2c", ONE)
    (model / "snapshots" / "main").mkdir(parents=True)
    (model / "snapshots" / "main" / "model.safetensors").symlink_to("../../blobs/0a1b2c")

    assert list(mm.inspect(model / "snapshots" / "main").tensors) == ["w"]


TOPOLOGY = """
schema = "megamind.topology/1"
[[nodes]]
name = "n0"
memory = "64GiB"
pool = "{pool}"
[[nodes.gpus]]
count = 2
memory = "{memory}"
"""


@dataclass(frozen=True)
class Request:
    """A request that a sound checkpoint cannot fulfil."""

    options: dict[str, object]
    error: type[MegamindError]
    names: tuple[str, ...]
    pool: str = "16GiB"
    memory: str = "24GiB"


REQUESTS = {
    "tp that does not divide the heads": Request(
        {"tp": 3}, RequestError, ("tp=3", "num_attention_heads=4", "tp may be 1, 2, 4")
    ),
    "more ranks than GPUs": Request({"tp": 4}, RequestError, ("needs 4 GPUs", "has 2 (n0 has 2)")),
    "more stages than layers": Request({"pp": 2}, RequestError, ("pp=2", "has 1")),
    "ep that does not divide": Request({"tp": 2, "ep": 3}, RequestError, ("ep=3", "dp x tp")),
    "ep without experts": Request({"tp": 2, "ep": 2}, RequestError, ("ep=2", "llama")),
    "no rank": Request({"tp": 0}, RequestError, ("tp=0",)),
    "a billion ranks": Request({"dp": 10**9}, RequestError, ("1000000000 ranks",)),
    "pool too small for one block": Request({"tp": 2}, CapacityError, ("n0", "pool"), pool="1KiB"),
    "devices too small": Request({"tp": 2}, CapacityError, ("n0:0", "4.00 KiB"), memory="4KiB"),
}
each_request = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())


@pytest.fixture
def topology(tmp_path: Path, request_: Request) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY.format(pool=request_.pool, memory=request_.memory))
    return path


@each_request
def test_planning_it_raises_the_class_and_names_the_culprit(llama: Path, topology: Path, request_: Request) -> None:
    with pytest.raises(request_.error) as caught:
        mm.plan(llama, mm.Parallel(**request_.options), topology)

    for name in request_.names:
        assert name in str(caught.value)


@each_request
def test_planning_it_on_the_command_line_exits_with_2(
    llama: Path, topology: Path, request_: Request, megamind: Any
) -> None:
    options = [text for name, value in request_.options.items() for text in (f"--{name}", str(value))]

    answer = megamind("plan", llama, "--topology", topology, *options)

    assert answer.code == 2
    assert answer.document["error"]["class"] == request_.error.__name__
    for name in request_.names:
        assert name in answer.document["error"]["message"]


def test_more_ranks_than_a_dim_has_indices_leave_the_last_ones_empty(tmp_path: Path) -> None:
    """No mistake: DTensor's Shard does the same."""
    folder = write_llama(tmp_path / "m", extra={"odd.weight": (1, 1)})
    rules = [mm.Rule(pattern="odd.weight", placement=mm.Shard(dim=0))]

    plan = mm.plan(folder, mm.Parallel(tp=2), rules=rules)

    rows = [row for row in plan.tables["views"].to_pylist() if row["name"] == "odd.weight"]
    assert [row["shape"] for row in rows] == [[1, 1], [0, 1]]
    assert set(LLAMA_SHAPES) < {row["name"] for row in plan.tables["views"].to_pylist()}
