"""A Ray job that loads a checkpoint, looks at what each rank holds, and gives everything back.

    ray job submit --working-dir . -- python examples/load_job.py /models/llama-3-8b --tp 2

It joins the cluster that runs the job. Without one it starts a local Ray: add ``--num-gpus 2``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import megamind_ray as mm


def describe(ctx: Any, limit: int) -> dict[str, Any]:
    """Runs in the actor of each rank, next to its tensors."""
    held = ctx.state_dict
    shown = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in list(held.items())[:limit]}
    return {"rank": ctx.rank, "coords": ctx.coords, "device": str(ctx.device), "num_tensors": len(held), "shown": shown}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="checkpoint, reachable from every node")
    for size in ("tp", "pp", "dp", "ep"):
        parser.add_argument(f"--{size}", type=int, default=1)
    parser.add_argument("--limit", type=int, default=5, help="tensors to show for each rank")
    parser.add_argument("--num-gpus", type=int, help="logical GPUs of a local Ray")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    mesh = mm.Parallel(tp=args.tp, pp=args.pp, dp=args.dp, ep=args.ep)
    # The fleet lives as long as this block: whatever ends it, actors and blocks are given back.
    with mm.connect(num_gpus=args.num_gpus) as cluster:
        model = cluster.load(args.uri, parallel=mesh)
        for rank in model.run(describe, args.limit):
            print(f"rank {rank['rank']} {rank['coords']} on {rank['device']}: {rank['num_tensors']} tensors")
            for name, (dtype, shape) in rank["shown"].items():
                print(f"    {name}: {dtype} {list(shape)}")
        report = model.report
        print(
            f"read {report.bytes_from_storage:,} bytes once in {report.seconds['transfer']:.2f} s, "
            f"verified: {report.verified}, faults: {len(report.faults)}"
        )
        model.unload()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except mm.MegamindError as error:
        sys.exit(f"{type(error).__name__}: {error}")
