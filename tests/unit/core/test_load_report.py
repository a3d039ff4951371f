from __future__ import annotations

import json
from typing import Any

import pytest

from megamind_ray.core.report import Fault, LoadReport, RankReport
from megamind_ray.errors import RequestError

REPORT = LoadReport(
    model="tiny",
    uri="/tiny",
    parallel={"tp": 1, "pp": 1, "dp": 1, "ep": 1},
    started_at="2030-01-01T00:00:00+00:00",
    bytes_total=10,
    bytes_from_storage=10,
    bytes_to_device=10,
    bytes_replicated=0,
    seconds={"total": 2.0, "transfer": 1.0},
    throughput_bytes_per_s=10.0,
    ranks=(RankReport(rank=0, pp=0, dp=0, tp=0, node="n0", gpu=0, num_tensors=1, arena_bytes=256, bytes_to_device=10),),
    faults=(Fault(kind="chunk_retried", where="/tiny [0, 8)", action="read in attempt 2", bytes_retried=8),),
    verified="transit",
    notes=("a note",),
)


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(REPORT.to_json()))
    return document


def test_a_report_comes_back_from_json() -> None:
    assert LoadReport.from_json(_document()) == REPORT


def test_fields_of_a_later_release_are_ignored() -> None:
    document = _document()
    document["mood"] = document["ranks"][0]["mood"] = document["faults"][0]["mood"] = document["kept"]["mood"] = "good"

    assert LoadReport.from_json(document) == REPORT


def test_another_schema_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'megamind\.report/2'; this release reads 'megamind\.report/1'"):
        LoadReport.from_json(_document() | {"schema": "megamind.report/2"})


@pytest.mark.parametrize("changed", [{"ranks": None}, {"ranks": [{}]}, {"faults": [1]}, {"kept": 3}])
def test_a_malformed_report_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="incomplete or malformed"):
        LoadReport.from_json(_document() | changed)


def test_a_report_without_a_field_is_refused() -> None:
    document = _document()
    del document["verified"]

    with pytest.raises(RequestError, match="verified"):
        LoadReport.from_json(document)
