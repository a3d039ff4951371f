"""What ``unpack`` has to do right, wherever it runs: the same cases for the interpreter and for a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamind_ray.core.tensor import DType
from megamind_ray.device.dtypes import torch_dtype
from megamind_ray.device.unpack import reference_unpack
from megamind_ray.device.unpack_spec import Scaling, UnpackSpec

__all__ = ["CASES", "UnpackCase", "differing"]

_FLOATS = (DType.F32, DType.F16, DType.BF16)
_SPECIALS = (
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    65504.0,
    65520.0,
    3.4e38,
    1.00390625,
    1.01171875,
)


@dataclass(frozen=True, slots=True)
class UnpackCase:
    """A case and its input, the same in every process."""

    name: str
    spec: UnpackSpec
    spread: bool = False

    def source(self) -> torch.Tensor:
        """Random bytes; values that are hard to round first."""
        random = torch.Generator().manual_seed(1)
        flat = torch.randint(0, 256, (max(1, self.spec.src_bytes),), dtype=torch.uint8, generator=random)
        if self.spec.src in _FLOATS and self.spec.src_bytes:
            specials = torch.tensor(_SPECIALS).to(torch_dtype(self.spec.src)).view(torch.uint8)
            flat[: specials.numel()] = specials[: flat.numel()]
        return flat

    def scales(self) -> torch.Tensor | None:
        """Random scales, those of E8M0 with their ends."""
        shape = self.spec.scale_shape
        random = torch.Generator().manual_seed(2)
        if shape is None:
            return None
        if self.spec.scaling is Scaling.MX:
            exponents = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
            exponents.view(-1)[:3] = torch.tensor([0, 1, 255], dtype=torch.uint8)[: exponents.numel()]
            return exponents
        return torch.rand(shape, generator=random) * 3 - 1

    def out(self, device: str = "cpu") -> torch.Tensor:
        """Where to: memory of its own, or columns of something wider."""
        rows, cols = self.spec.shape
        whole = torch.zeros((rows, 2 * cols + 3), device=device).to(torch_dtype(self.spec.dst))
        return whole[:, 2 : 2 + cols] if self.spread else whole[:, :cols].contiguous()

    def expected(self) -> tuple[torch.Tensor, int]:
        """Values and word sum by the reference."""
        result = reference_unpack(self.source(), self.spec, self.scales(), self.out(), with_sum=True)
        assert result.word_sum is not None
        return result.tensor, int(result.word_sum)


def differing(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many values have other bits; NaNs count as equal whatever they carry."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.dtype.itemsize]
    same = got.contiguous().view(bits) == wanted.contiguous().view(bits)
    if wanted.is_floating_point() and wanted.dtype.itemsize > 1:
        same |= got.isnan() & wanted.isnan()
    return int((~same).sum())


def _cases() -> list[UnpackCase]:
    cases = []
    for src in (*_FLOATS, DType.F8_E4M3, DType.F8_E5M2):
        for dst in _FLOATS:
            for transpose in (False, True):
                spec = UnpackSpec(rows=67, cols=131, row_stride=140, src=src, dst=dst, transpose=transpose)
                cases.append(UnpackCase(f"{src.label}-{dst.label}{'-transposed' * transpose}", spec))
    for src in (DType.U8, DType.I16, DType.I32):
        for transpose in (False, True):
            spec = UnpackSpec(rows=70, cols=133, src=src, dst=src, row_stride=150, transpose=transpose)
            cases.append(UnpackCase(f"raw-{src.label}{'-transposed' * transpose}", spec, spread=not transpose))
    for rows, cols, block in ((128, 128, 128), (130, 257, 128), (1, 1, 128), (97, 40, 16)):
        for transpose in (False, True):
            spec = UnpackSpec(
                rows=rows,
                cols=cols,
                src=DType.F8_E4M3,
                dst=DType.BF16,
                scaling=Scaling.BLOCK,
                block_rows=block,
                block_cols=block,
                transpose=transpose,
            )
            cases.append(UnpackCase(f"block{block}-{rows}x{cols}{'-transposed' * transpose}", spec))
    for src in (DType.I8, DType.F8_E4M3):
        for dst in _FLOATS:
            spec = UnpackSpec(rows=65, cols=129, src=src, dst=dst, scaling=Scaling.ROW)
            cases.append(UnpackCase(f"row-{src.label}-{dst.label}", spec, spread=True))
    for dst in _FLOATS:
        for transpose in (False, True):
            spec = UnpackSpec(
                rows=33, cols=96, row_stride=128, src=DType.F4, dst=dst, scaling=Scaling.MX, transpose=transpose
            )
            cases.append(UnpackCase(f"mx-{dst.label}{'-transposed' * transpose}", spec))
    for rows, cols in ((0, 5), (5, 0), (1, 1), (1, 1000), (1000, 1), (64, 128)):
        cases.append(UnpackCase(f"{rows}x{cols}", UnpackSpec(rows=rows, cols=cols, src=DType.F16, dst=DType.BF16)))
    return cases


CASES = tuple(_cases())
