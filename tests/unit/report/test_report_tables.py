"""Tables read as a person would read them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.report import Fault, Kept, LoadReport, RankReport
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Disk, Gpu, Node, Topology
from megamind_ray.report.summary import summarize_manifest
from megamind_ray.report.tables import VERIFIED_MEANING, manifest_tables, plain_table, report_tables, topology_table
from megamind_ray.units import GIB, MIB


def text_of(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(renderable)
    return stream.getvalue()


def cells(text: str, first: str) -> list[str]:
    """Cells of the one row that begins with a word."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [first]]
    return line.split()


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        uri="/models/tiny",
        root="/models/tiny",
        files=(
            FileInfo(path="a.safetensors", size_bytes=8 + 4 * MIB, data_begin=8),
            FileInfo(path="b.safetensors", size_bytes=8 + MIB, data_begin=8),
        ),
        tensors={
            "embed": TensorInfo("embed", DType.BF16, (1024, 2048), 0, 8, 8 + 4 * MIB),
            "norm": TensorInfo("norm", DType.F32, (512, 512), 1, 8, 8 + MIB),
        },
        config={"model_type": "llama"},
        tied={"lm_head": "embed"},
        header_bytes=16,
    )


@pytest.fixture
def report() -> LoadReport:
    rank = RankReport(
        rank=0,
        pp=0,
        dp=0,
        tp=0,
        node="n0",
        gpu=3,
        num_tensors=12,
        arena_bytes=GIB,
        bytes_to_device=GIB,
        bytes_direct=256 * MIB,
        bytes_pool=768 * MIB,
        seconds={"read": 0.1, "total": 2.0},
        sample_tensor="model.embed [128, 64]",
    )
    return LoadReport(
        model="tiny",
        uri="/models/tiny",
        parallel={"tp": 2, "pp": 1, "dp": 1, "ep": 1},
        started_at="2026-01-01T00:00:00+00:00",
        bytes_total=2 * GIB,
        bytes_from_storage=2 * GIB,
        bytes_to_device=2 * GIB,
        bytes_replicated=0,
        seconds={"total": 2.5, "transfer": 2.0},
        throughput_bytes_per_s=1.074e9,
        ranks=(rank, replace(rank, rank=1, tp=1, gpu=4)),
        verified="transit",
    )


def test_dtypes_are_shown_with_their_share_largest_first(manifest: Manifest) -> None:
    text = text_of(manifest_tables(summarize_manifest(manifest)))

    assert cells(text, "BF16") == ["BF16", "1", "2,097,152", "4.00", "MiB", "80.0%"]
    assert text.index("BF16") < text.index("F32")


def test_a_manifest_counts_parameters_and_files(manifest: Manifest) -> None:
    summary = summarize_manifest(manifest)

    assert summary.num_parameters == 1024 * 2048 + 512 * 512
    assert [(file.path, file.num_tensors) for file in summary.files] == [("a.safetensors", 1), ("b.safetensors", 1)]


def test_ties_are_listed(manifest: Manifest) -> None:
    assert cells(text_of(manifest_tables(summarize_manifest(manifest))), "lm_head") == ["lm_head", "embed"]


def test_without_a_sidecar_the_way_to_one_is_shown(manifest: Manifest) -> None:
    assert "megamind verify --record" in text_of(manifest_tables(summarize_manifest(manifest)))


def test_a_sidecar_is_shown_with_its_chunks(manifest: Manifest) -> None:
    checksums = FileChecksums(header_crc32=1, chunks_crc32=(2, 3))
    reference = Reference(origin="/models/tiny/sums.json", chunk_bytes=8 * MIB, files=(checksums, checksums))

    text = text_of(manifest_tables(summarize_manifest(replace(manifest, reference=reference))))

    assert "4 chunks of 8.00 MiB in /models/tiny/sums.json" in text


def test_a_checkpoint_of_many_files_says_how_many_are_not_shown(manifest: Manifest) -> None:
    files = tuple(FileInfo(path=f"{number}.safetensors", size_bytes=8, data_begin=8) for number in range(163))

    text = text_of(manifest_tables(summarize_manifest(replace(manifest, files=files))))

    assert "... and 123 more files; --json has all of them" in text


def test_names_with_brackets_are_shown_as_they_are() -> None:
    assert "experts[bold]" in text_of(plain_table(("tensor",), [("experts[bold]",)]))


def test_a_rank_is_shown_with_what_it_holds_and_how_fast_it_got_it(report: LoadReport) -> None:
    text = text_of(report_tables(report))

    row = cells(text, "1")
    assert row[:4] == ["1", "0.0.1", "n0:4", "12"]
    assert row[4:6] == ["1.00", "GiB"]
    assert "536.87 MB/s" in text
    assert row[6:8] == ["25%", "75%"]


@pytest.mark.parametrize("verified", ["reference", "transit", "off"])
def test_what_was_verified_is_explained(report: LoadReport, verified: str) -> None:
    text = " ".join(text_of(report_tables(replace(report, verified=verified))).split())  # type: ignore[arg-type]

    assert VERIFIED_MEANING[verified] in text  # type: ignore[index]


def test_faults_are_listed_with_what_was_done(report: LoadReport) -> None:
    fault = Fault(kind="worker_lost", where="rank 1 on n0:4", action="replaced", bytes_retried=GIB, at_s=1.25)

    text = text_of(report_tables(replace(report, faults=(fault,), bytes_retried=GIB)))

    assert cells(text, "1.25")[2:] == ["worker_lost", "rank", "1", "on", "n0:4", "replaced", "1.00", "GiB"]
    assert "1 fault" in text
    assert "1.00 GiB read again" in text


def test_a_fault_of_unknown_time_shows_none(report: LoadReport) -> None:
    fault = Fault(kind="chunk_retried", where="w.safetensors", action="read in attempt 2")

    text = text_of(report_tables(replace(report, faults=(fault,))))

    assert cells(text, "-")[:2] == ["-", "chunk_retried"]


def test_what_was_not_kept_is_shown_with_the_reason(report: LoadReport) -> None:
    kept = Kept(num_blocks=1, num_bytes=GIB, bytes_not_kept=GIB, reason="the pool of n0 is full")

    text = text_of(report_tables(replace(report, kept=kept)))

    assert "1.00 GiB in 1 block; 1.00 GiB not kept: the pool of n0 is full" in text


def test_a_load_that_took_no_time_has_no_speed(report: LoadReport) -> None:
    rank = replace(report.ranks[0], seconds={})

    assert "-" in cells(text_of(report_tables(replace(report, ranks=(rank,)))), "0")


def test_a_topology_shows_free_memory_and_rates() -> None:
    gpus = tuple(Gpu(index=index, memory_bytes=80 * GIB, free_bytes=40 * GIB) for index in range(2))
    disks = (Disk(name="nvme0", bytes_per_s=7e9), Disk(name="nvme1", bytes_per_s=7e9))
    node = Node(id=NodeId("n0"), gpus=gpus, memory_bytes=1024 * GIB, pool_bytes=600 * GIB, disks=disks)

    row = " ".join(cells(text_of(topology_table(Topology(nodes=(node,)))), "n0"))

    assert row == "n0 2 80.00 GiB of 160.00 GiB 1.00 TiB 600.00 GiB 14.00 GB/s -"
