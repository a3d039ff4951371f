"""Progress bars on stderr, where that is a terminal; silence elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from megamind_ray.cli.output import stderr_console
from megamind_ray.core import progress as core

__all__ = ["BytesProgress", "LoadProgress"]

# A bar per rank helps as long as all fit on a screen.
_MAX_RANK_BARS = 16
_MOVING = ("transfer", "finish")


class _Bars:
    """Bars that count bytes. As a context they are gone at the end, whatever the end is."""

    def __init__(self) -> None:
        console = stderr_console()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


class BytesProgress(_Bars):
    """One bar."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._task = self._bars.add_task(label, total=None)

    def show(self, bytes_done: int, bytes_total: int) -> None:
        """Takes bytes done, of bytes in total."""
        self._bars.update(self._task, completed=bytes_done, total=bytes_total)


class LoadProgress(_Bars):
    """One bar for a load and one for each rank.

    Attributes:
        moving: Whether bytes have begun to move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moving = False
        self._total = self._bars.add_task("queued", total=None)
        self._ranks: dict[int, TaskID] = {}

    def show(self, snapshot: core.Progress) -> None:
        """Takes what ``Cluster.load`` tells."""
        self.moving = self.moving or snapshot.phase in _MOVING
        self._bars.update(
            self._total,
            description=snapshot.phase,
            completed=snapshot.bytes_done,
            total=snapshot.bytes_total or None,
        )
        if len(snapshot.ranks) > _MAX_RANK_BARS:
            return
        for rank in snapshot.ranks:
            task = self._ranks.get(rank.rank)
            if task is None:
                task = self._ranks[rank.rank] = self._bars.add_task(f"rank {rank.rank}", total=rank.bytes_total)
            self._bars.update(task, completed=rank.bytes_done, total=rank.bytes_total)
