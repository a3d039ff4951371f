"""Copies between host and device, and unpacking on it: pinned, pageable and registered memory, streams, the kernel.

Needs a CUDA device: without one it says so, writes nothing, and exits with 2.

Rates are of the whole path, waits included, of ``CopyEngine`` on blocks of 32 MiB. Ratios compare turns of one run.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks._result import Measurement, parse_arguments, write_result
from megamind_ray.core.tensor import DType
from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_stream import CudaCopyStream
from megamind_ray.device.dtypes import torch_dtype
from megamind_ray.device.host_registry import HostRegistry
from megamind_ray.device.pinned import CudaHostRuntime
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.device.unpack import has_triton, reference_unpack, unpack
from megamind_ray.device.unpack_spec import Scaling, UnpackSpec

MIB = 1 << 20
BLOCK_BYTES = 32 * MIB
RUNS = Runs(0, BLOCK_BYTES, 1, BLOCK_BYTES)
REGISTERED_TARGET = 0.9
KERNEL_TARGET = 2.0


def main() -> None:
    arguments = parse_arguments(__doc__)
    if not torch.cuda.is_available():
        print(
            f"benchmarks.device: no GPU here (torch {torch.__version__} sees none); nothing measured", file=sys.stderr
        )
        sys.exit(2)
    rounds, num_blocks = (3, 8) if arguments.quick else (9, 32)
    rows = [*copy_rows(rounds, num_blocks), *stream_rows(rounds, num_blocks), *unpack_rows(rounds, arguments.quick)]
    properties = torch.cuda.get_device_properties(0)
    config = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "rounds": rounds,
        "blocks": num_blocks,
        "block_bytes": BLOCK_BYTES,
        "triton": has_triton(),
    }
    write_result("device", rows, config=config, arguments=arguments)


def copy_rows(rounds: int, num_blocks: int) -> list[Measurement]:
    """Both directions, from and to each kind of host memory, in turns."""
    runtime = CudaHostRuntime(torch.device("cuda", 0))
    registry = HostRegistry(runtime, max_bytes=2 * num_blocks * BLOCK_BYTES)
    plain, in_place = engine(), engine(registry=registry)
    flat = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    pinned, pageable = plain.staging(num_blocks * BLOCK_BYTES), np.ones(num_blocks * BLOCK_BYTES, np.uint8)
    pinned[:] = 1
    pool = shared_memory(num_blocks * BLOCK_BYTES)
    send(plain, flat, pinned)  # what CUDA sets up at the first copy
    first_use = rate(lambda: send(in_place, flat, pool), pool.nbytes)
    ways: Mapping[str, Callable[[], None]] = {
        "host to device, pinned": lambda: send(plain, flat, pinned),
        "host to device, pageable": lambda: send(plain, flat, pageable),
        "host to device, pool registered in place": lambda: send(in_place, flat, pool),
        "host to device, pool through a pinned buffer": lambda: send_staged(plain, flat, pool, pinned),
        "device to host, pinned": lambda: fetch(plain, flat, pinned),
        "device to host, pageable": lambda: fetch(plain, flat, pageable),
    }
    samples = in_turns(ways, rounds, num_blocks * BLOCK_BYTES)
    registered = samples["host to device, pool registered in place"]
    ratios = [ours / best for ours, best in zip(registered, samples["host to device, pinned"], strict=True)]
    staged = registry.counts.staged_bytes
    registry.close()
    return [
        Measurement(name="host to device, pool, first use with registration", unit="bytes/s", samples=[first_use]),
        *(Measurement(name=name, unit="bytes/s", samples=values) for name, values in samples.items()),
        Measurement(
            name="pool registered in place / pinned",
            unit="ratio",
            samples=ratios,
            target=REGISTERED_TARGET,
            better="higher",
        ),
        Measurement(name="pool bytes that could not be registered", unit="bytes", samples=[staged], target=0),
    ]


def stream_rows(rounds: int, num_blocks: int) -> list[Measurement]:
    """The same copies on 1, 2 and 12 streams."""
    engines = {count: engine(num_streams=count) for count in (1, 2, 12)}
    source = engines[1].staging(num_blocks * BLOCK_BYTES)
    source[:] = 1
    flat = torch.empty(num_blocks * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    ways: dict[str, Callable[[], None]] = {
        f"host to device, pinned, {count} streams": partial(send, copies, flat, source)
        for count, copies in engines.items()
    }
    samples = in_turns(ways, rounds, num_blocks * BLOCK_BYTES)
    return [Measurement(name=name, unit="bytes/s", samples=values) for name, values in samples.items()]


def unpack_rows(rounds: int, quick: bool) -> list[Measurement]:
    """The kernel and the reference in turns; bytes read and written. Empty without Triton."""
    if not has_triton():
        print("benchmarks.device: Triton is not installed; the kernel is left out", file=sys.stderr)
        return []
    size = 4096 if quick else 16384
    f8, f4 = DType.F8_E4M3, DType.F4
    specs = {
        "f32 to bf16": UnpackSpec(rows=size, cols=size, src=DType.F32, dst=DType.BF16),
        "f32 to bf16 transposed": UnpackSpec(rows=size, cols=size, src=DType.F32, dst=DType.BF16, transpose=True),
        "bf16 columns, transposed": UnpackSpec(
            rows=size, cols=size // 4, row_stride=size, src=DType.BF16, dst=DType.BF16, transpose=True
        ),
        "fp8 blocks to bf16": UnpackSpec(rows=size, cols=size, src=f8, dst=DType.BF16, scaling=Scaling.BLOCK),
        "int8 rows to bf16": UnpackSpec(rows=size, cols=size, src=DType.I8, dst=DType.BF16, scaling=Scaling.ROW),
        "mxfp4 to bf16": UnpackSpec(rows=size, cols=size, src=f4, dst=DType.BF16, scaling=Scaling.MX),
    }
    return [row for name, spec in specs.items() for row in one_unpack(name, spec, rounds)]


def one_unpack(name: str, spec: UnpackSpec, rounds: int) -> list[Measurement]:
    """Kernel with and without the word sum, and the reference."""
    dtype = torch_dtype(spec.dst)
    flat = torch.randint(0, 256, (spec.src_bytes,), dtype=torch.uint8, device="cuda")
    out = torch.empty(spec.shape, dtype=dtype, device="cuda")
    scales = None
    if spec.scale_shape is not None:
        scales = torch.ones(spec.scale_shape, device="cuda")
        scales = scales.to(torch.uint8) * 127 if spec.scaling is Scaling.MX else scales
    nbytes = spec.rows * spec.units * spec.unit_bytes + out.nbytes
    ways: Mapping[str, Callable[[], None]] = {
        "kernel": lambda: synchronised(lambda: unpack(flat, spec, scales=scales, out=out)),
        "kernel with sum": lambda: synchronised(lambda: unpack(flat, spec, scales=scales, out=out, with_sum=True)),
        "reference": lambda: synchronised(lambda: reference_unpack(flat, spec, scales, out, with_sum=False)),
    }
    samples = in_turns(ways, rounds, nbytes)
    ratios = [ours / theirs for ours, theirs in zip(samples["kernel"], samples["reference"], strict=True)]
    return [
        *(Measurement(name=f"{name}, {way}", unit="bytes/s", samples=values) for way, values in samples.items()),
        Measurement(
            name=f"{name}, kernel / reference", unit="ratio", samples=ratios, target=KERNEL_TARGET, better="higher"
        ),
    ]


def engine(*, registry: HostRegistry | None = None, num_streams: int = 1) -> CopyEngine:
    device = torch.device("cuda", 0)
    streams = partial(CudaCopyStream, device)
    return CopyEngine(device, streams, CudaHostRuntime(device), registry=registry, num_streams=num_streams)


def shared_memory(nbytes: int) -> Bytes:
    """Read-only shared memory with all its pages there, as blocks of the pool."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        mapping = mmap.mmap(file.fileno(), nbytes)
    writable = np.frombuffer(mapping, np.uint8)
    writable[:] = 1
    pool = np.frombuffer(mapping, np.uint8)
    pool.flags.writeable = False
    return pool


def blocks_of(data: Bytes) -> list[Bytes]:
    return [data[begin : begin + BLOCK_BYTES] for begin in range(0, data.nbytes, BLOCK_BYTES)]


def send(copies: CopyEngine, flat: torch.Tensor, source: Bytes) -> None:
    """All blocks, one ticket each; to one place, or to one after the other where there is room."""
    places = range(flat.numel() // BLOCK_BYTES)
    tickets = [
        copies.to_device(flat, RUNS.moved(places[number % len(places)] * BLOCK_BYTES), block)
        for number, block in enumerate(blocks_of(source))
    ]
    for ticket in tickets:
        assert ticket is not None
        ticket.wait()


def send_staged(copies: CopyEngine, flat: torch.Tensor, source: Bytes, pinned: Bytes) -> None:
    """Through two buffers in turns: one is filled while the device reads the other."""
    buffers = blocks_of(pinned)[:2]
    tickets: list[Any] = [None, None]
    for number, block in enumerate(blocks_of(source)):
        if tickets[number % 2] is not None:
            tickets[number % 2].wait()
        np.copyto(buffers[number % 2], block)
        tickets[number % 2] = copies.to_device(flat, RUNS, buffers[number % 2])
    for ticket in tickets:
        ticket.wait()


def fetch(copies: CopyEngine, flat: torch.Tensor, target: Bytes) -> None:
    tickets = [copies.to_host(flat, RUNS, block) for block in blocks_of(target)]
    for ticket in tickets:
        assert ticket is not None
        ticket.wait()


def synchronised(work: Callable[[], object]) -> None:
    work()
    torch.cuda.synchronize()


def in_turns(ways: Mapping[str, Callable[[], None]], rounds: int, nbytes: int) -> dict[str, list[float]]:
    """Bytes per second of each way, after one turn that warms up."""
    for work in ways.values():
        work()
    turns = [{name: rate(work, nbytes) for name, work in ways.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in ways}


def rate(work: Callable[[], None], nbytes: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
