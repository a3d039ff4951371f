"""Runs the kernel's cases in Triton's interpreter, which is chosen before Triton is imported: a process of its own."""

from __future__ import annotations

import json
import sys

import torch

from megamind_ray.device.unpack_triton import triton_unpack
from megamind_ray.testing.unpack_cases import CASES, differing


def main() -> None:
    results = {}
    for case in CASES:
        wanted, wanted_sum = case.expected()
        out = case.out()
        whole = out._base if out._base is not None else out
        untouched = whole.clone()
        got = triton_unpack(case.source(), case.spec, case.scales(), out, with_sum=True)
        assert got.word_sum is not None
        num_differing, word_sum = differing(got.tensor, wanted), int(got.word_sum)
        out.copy_(torch.zeros_like(out))
        results[case.name] = {
            "differing": num_differing,
            "sums": [word_sum, wanted_sum],
            "beside": differing(whole, untouched),
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
