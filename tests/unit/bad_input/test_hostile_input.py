"""Files that somebody made to hurt, or that a newcomer got wrong: an error of ours at once, or no harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import megamind_ray as mm
from megamind_ray.api.cluster import _absolute
from megamind_ray.core.plan import Plan
from megamind_ray.errors import IntegrityError, MegamindError, RequestError
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar
from megamind_ray.planning import load_rules
from megamind_ray.planning.topology_file import parse_topology
from megamind_ray.testing.handmade import LLAMA_CONFIG, entries, framed, write_llama, write_weights

DEEP_JSON = "[" * 100_000
DEEP_TOML = "a = " + DEEP_JSON
TP2 = mm.Parallel(tp=2)


# Names of tensors.

NAMES = {
    "upwards": "../../etc/passwd",
    "a line end": "model.layers.0\n.weight",
    "a terminal sequence": "\x1b[2J\x1b]0;owned\x07w",
    "a zero byte": "a\0b",
    "nothing": "",
    "a layer of 5,000 digits": f"model.layers.{'9' * 5000}.mlp.weight",
    "20,000 numbers": ".".join(["1"] * 20_000),
    "a glob": "[a-z]*?",
    "other scripts": "模型.🦄.веса",
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


@each_name
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_strange_name_is_a_name_like_others(tmp_path: Path, name: str, model_type: str) -> None:
    folder = write_llama(
        tmp_path / "m",
        config={**LLAMA_CONFIG, "model_type": model_type, "moe_intermediate_size": 4},
        extra={name: (4, 2)},
    )

    plan = mm.plan(folder, TP2, allow_replication=True)

    assert name in mm.load_state_dict(folder)
    assert name in {row["name"] for row in plan.tables["views"].to_pylist()}


@pytest.mark.parametrize("expert", ["9" * 5000, "x", "-1", "٣x"], ids=lambda text: text[:5])
def test_an_expert_without_a_number_is_named_where_experts_are_split(tmp_path: Path, expert: str) -> None:
    config = {**LLAMA_CONFIG, "model_type": "qwen3_moe", "moe_intermediate_size": 4}
    name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
    folder = write_llama(tmp_path / "m", config=config, extra={name: (4, 2)})

    assert mm.plan(folder).bytes_total == mm.inspect(folder).nbytes
    with pytest.raises(RequestError, match=r"model\.layers\.0\.mlp\.experts\.") as caught:
        mm.plan(folder, mm.Parallel(tp=2, ep=2), allow_replication=True)

    assert "no 'experts.N'" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_control_characters_of_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megamind_ray.cli import main

    name = NAMES["a terminal sequence"]
    folder = write_llama(tmp_path / "m", extra={name: (4, 2)})

    assert main(["inspect", str(folder), "--tensors"]) == 0
    assert main(["plan", str(folder), "--explain", name]) == 0
    assert main(["plan", str(folder), "--explain", name + "x"]) == 2

    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert r"\x1b[2J\x1b]0;owned\x07w" in captured.out


def test_a_megabyte_of_name_neither_fills_messages_nor_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megamind_ray.cli import main

    long, sound = "x" * (1 << 20), write_weights(tmp_path / "w.safetensors", {"a": (1,), "x" * (1 << 20): (1,)})
    header = {long: {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}
    (tmp_path / "broken.safetensors").write_bytes(framed(json.dumps(header).encode(), b"1"))

    with pytest.raises(IntegrityError, match=r"broken\.safetensors: tensor 'xxx.*F7") as caught:
        mm.inspect(tmp_path / "broken.safetensors")
    assert main(["inspect", str(sound), "--tensors"]) == 0

    assert len(str(caught.value)) < 1000
    assert min(len(line) for line in capsys.readouterr().out.splitlines() if "U8" in line and "[1]" in line) < 300


def test_an_expert_written_in_two_ways_does_not_replace_the_other(tmp_path: Path) -> None:
    projections = {f"{part}_proj.weight": (4, 4) for part in ("gate", "up", "down")}
    experts = {f"model.layers.0.mlp.experts.0.{name}": shape for name, shape in projections.items()}
    twice = "model.layers.0.mlp.experts.00.up_proj.weight"
    folder = write_llama(
        tmp_path / "m", config={**LLAMA_CONFIG, "model_type": "qwen3_moe"}, extra={**experts, twice: (4, 4)}
    )

    plan = mm.plan(folder)

    assert plan.bytes_total == mm.inspect(folder).nbytes
    assert twice in {row["name"] for row in plan.tables["tensors"].to_pylist()}


def test_ten_thousand_layers_of_a_byte_are_planned(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "w.safetensors", {f"model.layers.{i}.w": (1,) for i in range(10_000)})

    assert mm.plan(path, mm.Parallel(pp=2)).bytes_total == 10_000


def test_what_torch_has_no_dtype_for_is_named_and_given_raw_on_demand(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    (tmp_path / "w.safetensors").write_bytes(framed(json.dumps(header).encode(), b"123"))

    with pytest.raises(RequestError, match="'w'.*F6_E2M3"):
        mm.load_state_dict(tmp_path / "w.safetensors")

    assert bytes(mm.load_state_dict(tmp_path / "w.safetensors", raw=True)["w"].tolist()) == b"123"


# Configurations of models.


@pytest.mark.parametrize("setting", ["num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("value", ["4", 0, -4, 1.5, True, [], {}, "x" * 100_000], ids=lambda value: repr(value)[:9])
def test_a_count_that_is_none_is_named(tmp_path: Path, setting: str, value: object) -> None:
    folder = write_llama(tmp_path / "m", config={**LLAMA_CONFIG, setting: value})

    with pytest.raises(RequestError, match=rf"config\.json: {setting}=.*must be a positive integer") as caught:
        mm.plan(folder, TP2)

    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("count", [10**9, 10**30])
def test_absurdly_many_heads_are_refused_without_counting_them(tmp_path: Path, count: int, tp: int) -> None:
    folder = write_llama(tmp_path / "m", config={**LLAMA_CONFIG, "num_attention_heads": count})

    with pytest.raises(RequestError, match=f"num_attention_heads={count}") as caught:
        mm.plan(folder, mm.Parallel(tp=tp))

    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size='128'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, -1]}, r"weight_block_size=\[0, -1\]"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size='x'"),
        ({"quant_method": "gptq", "bits": 0}, "gptq with bits=0"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
        ({"quant_method": "mystery"}, "mystery"),
    ],
    ids=str,
)
def test_a_quantisation_that_makes_no_sense_is_named(tmp_path: Path, quantization: object, complaint: str) -> None:
    folder = write_llama(tmp_path / "m", config={**LLAMA_CONFIG, "quantization_config": quantization})

    with pytest.raises(RequestError, match=complaint):
        mm.plan(folder, TP2)


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"quant_method": None}], ids=repr)
def test_no_quantisation_in_whatever_form_is_none(tmp_path: Path, value: object) -> None:
    folder = write_llama(tmp_path / "m", config={**LLAMA_CONFIG, "quantization_config": value})

    assert mm.plan(folder, TP2).bytes_total == mm.inspect(folder).nbytes


@pytest.mark.parametrize(
    "text", ["", "null", "5", "[]", DEEP_JSON, '{"a": ' + "1" * 5000 + "}"], ids=lambda text: text[:7] or "empty"
)
def test_a_configuration_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    folder = write_llama(tmp_path / "m", config=text)

    with pytest.raises(RequestError, match=rf"{folder}/config\.json: "):
        mm.plan(folder, TP2)


# Things that are no files.


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_pipe_beside_the_weights_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write_weights(tmp_path / "model.safetensors", {"w": (4,)})
    os.mkfifo(tmp_path / name)

    with pytest.raises(RequestError, match=rf"{name}: is not a regular file"):
        mm.load_state_dict(tmp_path)


def test_a_link_to_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")

    for uri in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(RequestError):
            mm.load_file(uri)


def test_an_index_that_names_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "w.safetensors"}}')

    with pytest.raises(RequestError, match=r"w\.safetensors"):
        mm.inspect(tmp_path)


def test_a_file_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_weights(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors")), {"w": (4,)})

    with pytest.raises(RequestError, match="is not UTF-8; rename"):
        mm.plan(tmp_path)


# Paths and URIs as people write them.


@pytest.fixture
def spaced(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "my models" / "50% done.safetensors", {"w": (4,)})


@pytest.mark.parametrize("prefix", ["file:", "file://", "file://localhost"])
def test_file_uris_are_percent_decoded(spaced: Path, prefix: str) -> None:
    assert list(mm.load_file(prefix + quote(str(spaced)))) == ["w"]


def test_a_plain_path_is_not_decoded(spaced: Path) -> None:
    assert list(mm.load_file(str(spaced))) == ["w"]


@pytest.mark.parametrize(
    "uri", ["", "~nobody-of-this-name/x", "file:", "file://elsewhere/x", "ftp://x/y", "s3://", "a\0b"]
)
def test_a_uri_that_leads_nowhere_is_quoted(uri: str, megamind: Any) -> None:
    with pytest.raises(RequestError) as caught:
        mm.inspect(uri)

    assert uri.replace("\0", r"\x00") in str(caught.value) or repr(uri) in str(caught.value)
    assert megamind("inspect", uri).code == 2


def test_what_a_cluster_is_given_does_not_depend_on_the_planners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert _absolute("m/") == _absolute("file:m") == _absolute("~/m") == _absolute(Path("m")) == f"{tmp_path}/m"
    assert _absolute("s3://bucket/m") == "s3://bucket/m"
    for nothing in ("", "a\0b"):
        with pytest.raises(RequestError, match="names no checkpoint"):
            _absolute(nothing)


# Files that the user writes.


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "one list named 'rules'"),
        (DEEP_TOML, "cannot be read"),
        ("rules = 5", "one list named 'rules'"),
        ("rules = [5]", "rule 1"),
        ("[[rules]]\npattern = 5", "'pattern' is missing"),
        ('[[rules]]\npattern = "*"\nstage = ["first"]', "stage="),
        ('[[rules]]\npattern = "*"\nplacement = ["shard"]', "placement="),
        ('[[rules]]\npattern = "*"\nplacement = "shard"\ndim = "0"', "dim='0'"),
        ('[[rules]]\npattern = "*"\nplacement = "experts"\ninner = 5', "inner: 5 is not a table"),
        ('[[rules]]\npattern = "*"\nplacement = "shard"\ndim = ' + "9" * 5000, "cannot be read"),
    ],
    ids=lambda text: text[-20:],
)
def test_rules_that_are_none_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)

    with pytest.raises(RequestError, match=rf"rules file {path}.*{complaint}"):
        load_rules(path)


def test_a_rule_for_a_dim_that_is_not_there_names_rule_and_tensor(llama: Path) -> None:
    rules = [mm.Rule(pattern="*.q_proj.weight", placement=mm.Shard(dim=9))]

    with pytest.raises(RequestError, match=r"q_proj\.weight"):
        mm.plan(llama, TP2, rules=rules)


NODE = 'schema = "megamind.topology/1"\n[[nodes]]\nname = "a"\nmemory = "1TB"\npool = "1GB"\n'
GPU = '[[nodes.gpus]]\nmemory = "80GB"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DEEP_TOML, "not TOML"),
        (NODE + GPU + "count = 1000000000000", r"gpus\[0\]: count = 1000000000000 is more than"),
        (NODE + "count = 1000000000000\n" + GPU, r"nodes\[0\]: count = 1000000000000 is more than"),
        (NODE + GPU + "index = 99999999999999999999", "index = 99999999999999999999"),
        (NODE + GPU.replace("80GB", "9" * 22 + "GB"), "memory"),
        (NODE + GPU.replace('"80GB"', "9" * 5000), "not TOML"),
        (NODE + GPU + "pcie = nan", "pcie: nan"),
        (NODE + GPU + 'pcie = "fast"', "pcie: 'fast'"),
    ],
    ids=lambda text: text[-20:],
)
def test_a_topology_that_cannot_be_is_named_at_once(text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=f"topology file t.toml.*{complaint}"):
        parse_topology(text, origin="t.toml")


@pytest.mark.parametrize("text", [DEEP_TOML, "io = 5", "[nowhere]", "[io]\nchunk_bytes = '9999999PB'", "\xff"])
def test_settings_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "megamind.toml"
    path.write_text(text, encoding="latin-1")

    with pytest.raises(RequestError, match=r"megamind\.toml"):
        mm.load_config(path, environ={})


# Files that this package writes.


def _set(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.update(fields)


def _set_file(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["files"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        (_set(schema="megamind.sidecar/9"), RequestError, "megamind.sidecar/9"),
        (_set(algorithm="md5"), RequestError, "md5"),
        (_set(chunk_bytes="8MiB"), IntegrityError, "chunk_bytes"),
        (_set(chunk_bytes=1), IntegrityError, "chunk_bytes"),
        (_set(files={}), IntegrityError, "files must be a list"),
        (_set(files=[]), IntegrityError, "no file 'model.safetensors'"),
        (_set(files=[5]), IntegrityError, "no path"),
        (_set_file(path=["x"]), IntegrityError, "no path"),
        (_set_file(size_bytes=10**15), IntegrityError, "chunks_crc32"),
        (_set_file(data_begin=-1), IntegrityError, "data_begin"),
        (_set_file(chunks_crc32=[2**32]), IntegrityError, "chunks_crc32"),
        (_set_file(header_crc32="0"), IntegrityError, "header_crc32"),
    ],
)
def test_a_sidecar_that_makes_no_sense_is_named(
    llama: Path, change: Callable[[dict[str, Any]], object], error: type[MegamindError], complaint: str
) -> None:
    manifest = open_manifest(llama)
    path = Path(default_sidecar_path(manifest))
    write_sidecar(record_checksums(manifest), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))

    with pytest.raises(error, match=complaint) as caught:
        mm.load_state_dict(llama)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", DEEP_JSON.encode(), b"\xff"], ids=lambda raw: repr(raw[:3]))
def test_a_sidecar_that_is_none_is_named(llama: Path, raw: bytes) -> None:
    (llama / "megamind-checksums.json").write_bytes(raw)

    with pytest.raises(IntegrityError, match=r"megamind-checksums\.json: the sidecar"):
        mm.load_state_dict(llama)


@pytest.mark.parametrize("text", ["", "[]", "null", DEEP_JSON, '{"schema": "megamind.plan/2"}'], ids=lambda t: t[:9])
def test_a_plan_that_is_none_is_named(llama: Path, tmp_path: Path, text: str) -> None:
    mm.plan(llama).save(tmp_path / "plan")
    (tmp_path / "plan" / "plan.json").write_text(text)

    with pytest.raises(RequestError, match=f"{tmp_path}/plan: "):
        Plan.load(tmp_path / "plan")


@pytest.mark.parametrize(
    "fields",
    [{"uri": None}, {"chunk_bytes": "8"}, {"bytes_total": -1}, {"disk_tensors": [1]}, {"notes": "x"}, {"keep": 1}],
    ids=str,
)
def test_a_plan_with_a_field_of_another_type_is_damaged(llama: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    mm.plan(llama).save(tmp_path / "plan")
    path = tmp_path / "plan" / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    with pytest.raises(RequestError, match=f"damaged .*{next(iter(fields))}"):
        Plan.load(tmp_path / "plan")


@pytest.mark.parametrize("document", [None, 5, [], "x", {}, {"schema": "megamind.report/9"}], ids=repr)
def test_a_report_that_is_none_is_refused(document: Any) -> None:
    with pytest.raises(RequestError, match=r"report schema .* megamind\.report/1|report schema"):
        mm.LoadReport.from_json(document)


def test_a_report_cannot_be_written_into_a_folder(llama: Path, tmp_path: Path, megamind: Any) -> None:
    answer = megamind("load", llama, "--report", tmp_path)

    assert answer.code == 2
    assert f"{tmp_path}: is a folder" in answer.document["error"]["message"]


def test_entries_of_the_tests_are_sound(tmp_path: Path) -> None:
    header = entries({"a": (2, 3), "b": ()})

    assert [entry["data_offsets"] for entry in header.values()] == [[0, 6], [6, 7]]
