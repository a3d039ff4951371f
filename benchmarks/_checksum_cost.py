"""The same load with checksums and without: what checking costs, and that it is on when it should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import megamind_ray as mm
from benchmarks._checkpoint import Checkpoint
from benchmarks._contenders import OURS, Contender, Load, Recycled
from megamind_ray.io import default_sidecar_path, record_checksums, write_sidecar

__all__ = ["OFF", "ON", "ChecksumCost"]

OFF, ON = "checksums off", "checksums on"


class ChecksumCost:
    """Two contenders that are the same load; before a turn of one the sidecar is put beside the files, else away.

    Args:
        checkpoint: Its folder gets a sidecar; ``close`` takes it away again.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        manifest = mm.inspect(checkpoint.folder)
        self._sidecar = Path(default_sidecar_path(manifest))
        self._away = checkpoint.folder / "sidecar-not-in-use"
        write_sidecar(record_checksums(manifest), self._away)

    def contenders(self) -> tuple[Contender, Contender]:
        """Off and on."""
        off = dataclasses.replace(OURS[0], name=OFF, prepare=lambda *where: self._prepare(False, *where))
        return off, dataclasses.replace(off, name=ON, prepare=lambda *where: self._prepare(True, *where))

    def check_it_is_on(self) -> None:
        """Loads with one wrong checksum in the sidecar; that has to fail.

        Raises:
            RuntimeError: It did not.
        """
        self._put(True)
        right = self._sidecar.read_text(encoding="utf-8")
        document = json.loads(right)
        document["files"][0]["chunks_crc32"][0] ^= 1
        self._sidecar.write_text(json.dumps(document), encoding="utf-8")
        try:
            mm.load_state_dict(self._checkpoint.folder)
        except mm.IntegrityError:
            return
        finally:
            self._sidecar.write_text(right, encoding="utf-8")
        raise RuntimeError(f"{self._sidecar}: a wrong checksum went unnoticed, so nothing was checked")

    def close(self) -> None:
        """Takes the sidecar away."""
        self._sidecar.unlink(missing_ok=True)
        self._away.unlink(missing_ok=True)

    def _prepare(self, on: bool, checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
        self._put(on)
        return OURS[0].prepare(checkpoint, recycled)

    def _put(self, on: bool) -> None:
        source, target = (self._away, self._sidecar) if on else (self._sidecar, self._away)
        if source.exists():
            source.rename(target)
