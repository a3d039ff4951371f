"""Clients for remote storage: bytes per second on loopback, what they notice of damaged answers, what a gap costs.

All clients read the same ranges in turns, with as many threads, into memory that was touched before, so that a busy
machine slows all of them down. ``s3 (moto)`` is moto's server, which is slower than its clients, so that their ratios
say little; ``s3 (range server)`` and ``http`` are a server of files that is not. Ratios are between rounds of one run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._result import Measurement, parse_arguments, write_result
from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import parse_location
from megamind_ray.io.http_source import HttpSource
from megamind_ray.io.opening import open_location
from megamind_ray.testing.fault_server import Answer, Fault, FaultProxy, FaultServer, Request, scripted
from megamind_ray.testing.range_server import RangeServer
from megamind_ray.testing.s3_server import CREDENTIALS, S3Server

Reader = Callable[[int, memoryview], object]

THREADS = 16
RANGE_BYTES = 8 << 20
GAP_LATENCY_S = 0.03
# What a client may not take for right: the body or its range is not what was asked for.
DAMAGES = (Fault.RESET, Fault.TRUNCATED, Fault.SHORT_RANGE, Fault.WRONG_RANGE)
RETRY = RetryConfig(attempts=1, request_s=60.0)
FILE_SERVER = """
import sys
from pathlib import Path
from megamind_ray.testing.range_server import RangeServer
with RangeServer(Path(sys.argv[1])) as server:
    print(server.uri, flush=True)
    sys.stdin.read()
"""


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """A range server in a process of its own."""
    command = [sys.executable, "-c", FILE_SERVER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


def s3_clients(endpoint: str, key: str) -> dict[str, Reader]:
    """A reader of one object by each client: ours, and the libraries as one would use them."""
    os.environ.update({**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint})
    import fsspec
    from obstore.fsspec import FsspecStore
    from pyarrow import fs

    ours = open_location(parse_location(f"s3://{key}"), io=IoConfig(), retry=RETRY)
    through_fsspec = FsspecStore(
        "s3", client_options={"allow_http": True}, retry_config={"max_retries": 0}, skip_instance_cache=True
    )
    arrow = fs.S3FileSystem(
        endpoint_override=endpoint, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1)
    ).open_input_file(key)
    clients: dict[str, Reader] = {
        "ours": ours.read_into,
        "obstore.fsspec": by_cat(through_fsspec, key),
        "pyarrow": lambda offset, buffer: put(buffer, arrow.read_at(buffer.nbytes, offset)),
    }
    if importlib.util.find_spec("s3fs") is not None:
        s3fs = fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            config_kwargs={"retries": {"total_max_attempts": 1}},
            use_listings_cache=False,
        )
        s3fs.retries = 1
        clients["s3fs"] = by_cat(s3fs, key)
    return clients


def http_clients(uri: str) -> dict[str, Reader]:
    import fsspec

    return {
        "ours": HttpSource(uri, RETRY).read_into,
        "fsspec": by_cat(fsspec.filesystem("http", skip_instance_cache=True), uri),
    }


def by_cat(filesystem: Any, path: str) -> Reader:
    return lambda offset, buffer: put(buffer, filesystem.cat_file(path, start=offset, end=offset + buffer.nbytes))


def put(buffer: memoryview, data: Any) -> None:
    piece = memoryview(data)
    if piece.nbytes != buffer.nbytes:
        raise OSError(f"{piece.nbytes} of {buffer.nbytes} bytes")
    buffer[:] = piece


def race(clients: dict[str, Reader], size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of each client in each round; the first round, which makes connections, is not counted."""
    memory = np.ones(size_bytes, np.uint8)
    rates: dict[str, list[float]] = {name: [] for name in clients}
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(rounds + 1):
            for name, read in clients.items():
                begin = time.perf_counter()
                ranges = range(0, size_bytes, RANGE_BYTES)
                list(pool.map(lambda at, read=read: read(at, memoryview(memory)[at : at + RANGE_BYTES]), ranges))
                if number:
                    rates[name].append(size_bytes / (time.perf_counter() - begin))
    return rates


def rate_rows(place: str, rates: dict[str, list[float]], *, target: float | None = None) -> list[Measurement]:
    rows = [Measurement(name=f"{place}: {name}", unit="bytes/s", samples=it) for name, it in rates.items()]
    for name in list(rates)[1:]:
        ratios = [ours / other for ours, other in zip(rates["ours"], rates[name], strict=True)]
        row = f"{place}: ours / {name}"
        rows.append(Measurement(name=row, unit="ratio", samples=ratios, target=target, better="higher"))
    return rows


def noticed_rows(place: str, clients: dict[str, Reader], server: FaultServer, data: bytes) -> list[Measurement]:
    """The share of damaged answers that a client does not hand over as if they were right."""
    rows = []
    for name, read in clients.items():
        noticed = []
        for damage in DAMAGES:
            server.faults = scripted(damage)
            buffer = bytearray(1 << 16)
            try:
                read(1 << 16, memoryview(buffer))
            except Exception:  # noqa: BLE001 - each client has its own
                noticed.append(True)
            else:
                noticed.append(bytes(buffer) == data[1 << 16 : 1 << 17])  # it asked again by itself
            server.faults = None
        share = sum(noticed) / len(noticed)
        missed = ", ".join(damage.name for damage, ok in zip(DAMAGES, noticed, strict=True) if not ok)
        if missed:
            print(f"{place}: {name} took for right: {missed}", file=sys.stderr)
        target = 1.0 if name == "ours" else None
        row = f"{place}: damage noticed by {name}"
        rows.append(Measurement(name=row, unit="share", samples=[share], target=target, better="higher"))
    return rows


def gap_rows(folder: Path, size_bytes: int, rounds: int) -> list[Measurement]:
    """Seconds for 256 KiB ranges with gaps between them, one request each and read over, ``GAP_LATENCY_S`` away."""
    rows = []
    with RangeServer(folder) as server:
        files = server.answer

        def far(request: Request) -> Answer:
            server.hold(GAP_LATENCY_S)
            return files(request)

        server.answer = far
        source = HttpSource(f"{server.uri}/bucket/data", RETRY)
        piece = 256 << 10
        for gap in (64 << 10, 256 << 10, 1 << 20, 4 << 20):
            step = piece + gap
            apart = [(at, piece) for at in range(0, size_bytes - step, step)]
            # As the planner cuts them: chunks of 8 MiB at most.
            over = [(at, min(RANGE_BYTES, size_bytes - at)) for at in range(0, size_bytes, RANGE_BYTES)]
            ratios = []
            for _ in range(rounds):
                seconds = [timed_reads(source, ranges) for ranges in (apart, over)]
                ratios.append(seconds[0] / seconds[1])
            row = f"gap of {gap >> 10} KiB: asked apart / read over"
            rows.append(Measurement(name=row, unit="ratio", samples=ratios))
    return rows


def timed_reads(source: HttpSource, ranges: list[tuple[int, int]]) -> float:
    buffers = [memoryview(bytearray(size)) for _, size in ranges]
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda item: source.read_into(item[0][0], item[1]), zip(ranges, buffers, strict=True)))
    return time.perf_counter() - begin


def main() -> None:
    arguments = parse_arguments(__doc__)
    size_bytes, rounds = (64 << 20, 3) if arguments.quick else (256 << 20, 9)
    folder = Path(tempfile.mkdtemp(prefix="remote-"))
    rows: list[Measurement] = []
    try:
        data = np.random.default_rng(0).bytes(size_bytes)
        (folder / "bucket").mkdir()
        (folder / "bucket" / "data").write_bytes(data)
        with file_server(folder) as uri:
            rows += rate_rows("http", race(http_clients(f"{uri}/bucket/data"), size_bytes, rounds), target=1.0)
            rows += rate_rows("s3 (range server)", race(s3_clients(uri, "bucket/data"), size_bytes, rounds), target=0.9)
        with S3Server() as s3:
            s3.make_bucket("bucket")
            s3.put("bucket", "data", data[: 64 << 20])
            rows += rate_rows("s3 (moto)", race(s3_clients(s3.uri, "bucket/data"), 64 << 20, min(rounds, 5)))
            with FaultProxy(s3.uri) as proxy:
                rows += noticed_rows("s3", s3_clients(proxy.uri, "bucket/data"), proxy, data)
        with RangeServer(folder) as server:
            rows += noticed_rows("http", http_clients(f"{server.uri}/bucket/data"), server, data)
        rows += gap_rows(folder, size_bytes // 2, min(rounds, 3))
    finally:
        shutil.rmtree(folder)
    config = {"threads": THREADS, "range_bytes": RANGE_BYTES, "size_bytes": size_bytes, "rounds": rounds}
    write_result("remote", rows, config=config, arguments=arguments)


if __name__ == "__main__":
    main()
