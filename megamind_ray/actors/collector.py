"""The garbage collector in processes that are an actor and nothing else."""

from __future__ import annotations

import gc

__all__ = ["spare_imports"]


def spare_imports() -> None:
    """What is there by now is never looked at again, nor freed: modules, mostly.

    A full collection in a process that has imported Ray takes 35 to 100 ms, in the middle of a load where it falls
    into one, and each unloading needs one.
    """
    gc.collect()
    gc.freeze()
