"""The unpack kernel on a real device: the reference's bits, and the shared memory that it takes."""

from __future__ import annotations

import pytest
import torch

from megamind_ray.core.tensor import DType
from megamind_ray.device.unpack import reference_unpack, unpack
from megamind_ray.device.unpack_spec import Scaling, UnpackSpec
from megamind_ray.testing.unpack_cases import CASES, UnpackCase, differing

pytestmark = pytest.mark.gpu


def _on_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cuda()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_kernel_and_reference_give_the_same_bits(case: UnpackCase) -> None:
    pytest.importorskip("triton")
    wanted, wanted_sum = case.expected()
    out = case.out("cuda")
    whole = out._base if out._base is not None else out
    untouched = whole.cpu()

    result = unpack(case.source().cuda(), case.spec, scales=_on_device(case.scales()), out=out, with_sum=True)

    assert differing(result.tensor.cpu(), wanted) == 0
    assert result.word_sum is not None
    assert int(result.word_sum) == wanted_sum
    out.zero_()
    assert differing(whole.cpu(), untouched) == 0


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_reference_gives_the_same_bits_on_both_devices(case: UnpackCase) -> None:
    wanted, wanted_sum = case.expected()

    result = reference_unpack(
        case.source().cuda(), case.spec, _on_device(case.scales()), case.out("cuda"), with_sum=True
    )

    assert differing(result.tensor.cpu(), wanted) == 0
    assert result.word_sum is not None
    assert int(result.word_sum) == wanted_sum


@pytest.mark.parametrize(
    "spec",
    [
        UnpackSpec(rows=512, cols=512, src=DType.F32, dst=DType.F32, transpose=True),
        UnpackSpec(rows=512, cols=512, src=DType.F8_E4M3, dst=DType.BF16, scaling=Scaling.BLOCK, transpose=True),
        UnpackSpec(rows=512, cols=512, src=DType.F4, dst=DType.BF16, scaling=Scaling.MX),
    ],
    ids=["f32", "fp8", "mxfp4"],
)
def test_the_kernel_as_compiled_for_this_device_stays_within_48_kib(spec: UnpackSpec) -> None:
    pytest.importorskip("triton")
    from megamind_ray.device.unpack_triton import COMPILE_OPTIONS, SHARED_BYTES, kernel_constants, unpack_kernel

    case = UnpackCase("shared", spec)
    out, source, scales = case.out("cuda"), case.source().cuda(), _on_device(case.scales())
    compiled = unpack_kernel.warmup(
        source.view({1: torch.uint8, 4: torch.uint32}[spec.unit_bytes]),
        source if scales is None else scales,
        out.view(torch.uint32) if spec.raw else out,
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        spec.rows,
        spec.units,
        spec.stride_units,
        *((out.stride(1), out.stride(0)) if spec.transpose else out.stride()),
        grid=(1,),
        **kernel_constants(spec, with_sum=True),
        **COMPILE_OPTIONS,
    )

    assert compiled is not None
    assert 0 < compiled.metadata.shared <= SHARED_BYTES


def test_a_slice_larger_than_4_gib_apart_is_addressed_right() -> None:
    rows, stride = 3, (1 << 31) + 64
    if torch.cuda.mem_get_info()[0] < 3 * rows * stride:
        pytest.skip("needs 20 GiB of free device memory")
    flat = torch.zeros(rows * stride, dtype=torch.uint8, device="cuda")
    for row in range(rows):
        flat[row * stride : row * stride + 16] = torch.arange(16, device="cuda", dtype=torch.uint8) + 16 * row
    spec = UnpackSpec(rows=rows, cols=16, row_stride=stride, src=DType.U8, dst=DType.U8)

    result = unpack(flat, spec, with_sum=True)

    assert torch.equal(result.tensor.cpu().flatten(), torch.arange(48, dtype=torch.uint8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    case = CASES[0]
    wanted, _ = case.expected()

    result = unpack(case.source().to("cuda:1"), case.spec)

    assert differing(result.tensor.cpu(), wanted) == 0
