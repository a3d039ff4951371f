"""The kernel in Triton's interpreter against the reference; and compiled for devices that are not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.core.tensor import DType
from megamind_ray.device.unpack_spec import Scaling, UnpackSpec
from megamind_ray.testing.unpack_cases import CASES, UnpackCase

triton = pytest.importorskip("triton")

CHILD = Path(__file__).parent / "interpreter_child.py"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CHILD)], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_kernel_and_reference_give_the_same_bits(interpreted: dict[str, dict[str, Any]], case: UnpackCase) -> None:
    result = interpreted[case.name]

    assert result["differing"] == 0
    assert result["sums"][0] == result["sums"][1]
    assert result["beside"] == 0


def _spec(src: DType, dst: DType, scaling: Scaling = Scaling.NONE, *, transpose: bool = True) -> UnpackSpec:
    return UnpackSpec(rows=256, cols=256, src=src, dst=dst, scaling=scaling, transpose=transpose)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "spec",
    [
        _spec(DType.F32, DType.F32),
        _spec(DType.U8, DType.U8),
        _spec(DType.F8_E4M3, DType.BF16, Scaling.BLOCK),
        _spec(DType.I8, DType.F32, Scaling.ROW, transpose=False),
        _spec(DType.F4, DType.F32, Scaling.MX),
        _spec(DType.F4, DType.BF16, Scaling.MX, transpose=False),
    ],
    ids=lambda spec: f"{spec.src.label}-{spec.dst.label}-{spec.scaling}{'-transposed' * spec.transpose}",
)
def test_the_compiled_kernel_keeps_to_its_tile(
    spec: UnpackSpec, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 48 KiB of shared memory, and 16 bytes in each access on both sides, transposed or not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    compiled = _compile(spec, capability)

    assert 0 < compiled.metadata.shared <= 48 << 10
    assert compiled.asm["cubin"]
    num_bytes_a_thread = 64 * 64 * spec.unit_bytes // 128
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"])) == num_bytes_a_thread // 16
    num_bytes_a_thread = 64 * 64 * (2 if spec.src is DType.F4 else 1) * (spec.dst.bits // 8) // 128
    assert len(re.findall(r"st\.global\S*\.v4\.b32", compiled.asm["ptx"])) == num_bytes_a_thread // 16


def _compile(spec: UnpackSpec, capability: int) -> Any:
    """As Triton compiles it at the first call, but for a device that is named."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megamind_ray.device.unpack_triton import COMPILE_OPTIONS, kernel_constants, unpack_kernel

    bits = {1: "*u8", 2: "*u16", 4: "*u32"}[spec.unit_bytes]
    floats = {DType.F32: "*fp32", DType.F16: "*fp16", DType.BF16: "*bf16"}
    near, far = ("dst_row", "dst_col") if spec.transpose else ("dst_col", "dst_row")
    constants = kernel_constants(spec, with_sum=True) | {near: 1}
    signature = {
        "src": bits,
        "scales": "*u8" if spec.scaling is Scaling.MX else "*fp32",
        "dst": bits if spec.raw else floats[spec.dst],
        "sums": "*i32",
        **dict.fromkeys(("rows", "units", "src_stride", "dst_row", "dst_col"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    attributes = {
        (unpack_kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in ("src", "scales", "dst", "sums", "rows", "units", "src_stride", far)
    }
    source = ASTSource(unpack_kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(COMPILE_OPTIONS))
