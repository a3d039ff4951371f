"""Where the Hugging Face client keeps what it downloaded, and what to do where the hub does not answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from megamind_ray.config import hub_cache_path

__all__ = ["cached_snapshot", "offline_remedy"]

_MODEL: Final = re.compile(r"hf://(?:models/|(?!datasets/|spaces/|buckets/))([^/@]+/[^/@]+)(?:@([^/]+))?(?:/.*)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def cached_snapshot(repository: str, revision: str = "main") -> Path | None:
    """The folder of a model in this machine's cache, which loads as any folder; None if it is not there.

    Args:
        repository: ``ORG/NAME``.
        revision: A branch, a tag or a commit.
    """
    folder = hub_cache_path() / f"models--{repository.replace('/', '--')}"
    try:
        named = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        named = revision
    snapshot = folder / "snapshots" / named
    try:
        return snapshot if _COMMIT.fullmatch(named) and snapshot.is_dir() else None
    except OSError:  # a folder that may not be looked into
        return None


def offline_remedy(uri: str) -> str | None:
    """How to go on without the hub; None for what is not on it.

    Args:
        uri: A model on the hub, or a file of one.
    """
    if not uri.startswith("hf://"):
        return None
    match = _MODEL.fullmatch(uri)
    if match is None:
        return "download it where the hub can be reached, and give the folder of the copy"
    repository, revision = match[1], match[2] or "main"
    snapshot = cached_snapshot(repository, revision)
    if snapshot is not None:
        return f"load the copy in this machine's cache: {snapshot}"
    option = "" if revision == "main" else f" --revision {shlex.quote(revision)}"
    command = f"hf download {shlex.quote(repository)}{option} --local-dir DIR"
    return (
        f"download it where the hub can be reached (`{command}`, which was "
        f"`huggingface-cli download` in older releases) and give DIR; {hub_cache_path()}, this machine's cache, has no "
        "copy"
    )
