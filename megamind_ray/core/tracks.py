"""Where in a timeline stands what a node or a rank does: names of tracks and series, and recorders that know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from megamind_ray.core.recorder import Recorder
from megamind_ray.core.report import Fault, Verified
from megamind_ray.errors import masked

__all__ = [
    "PLANNER_TRACK",
    "NodeRecorder",
    "NodeTracks",
    "RankRecorder",
    "device_series",
    "rank_track",
    "short_node",
]

PLANNER_TRACK: Final = "planner"

_RAY_ID_DIGITS: Final = 56


def short_node(node: str) -> str:
    """A node's name for people: Ray's ids have 56 digits, the first eight tell them apart."""
    return node[:8] if len(node) == _RAY_ID_DIGITS else node


def rank_track(rank: int) -> str:
    """Track of a rank."""
    return f"rank {rank}"


def device_series(rank: int) -> str:
    """Series of the bytes that are on a rank's device."""
    return f"bytes rank {rank}/device"


@dataclass(frozen=True, slots=True)
class NodeTracks:
    """Tracks and series of a node.

    Attributes:
        storage: Reads of its agent.
        pool: Verifying, cutting, putting.
        wire: Blocks that come from other nodes.
        host: Series of the bytes of credit that are in use.
        storage_rate: Series of how fast its agent and its ranks read.
    """

    storage: str
    pool: str
    wire: str
    host: str
    storage_rate: str

    @classmethod
    def of(cls, node: str) -> Self:
        """Those of a node, by its id or its short name."""
        name = short_node(node)
        return cls(
            storage=f"{name}/storage",
            pool=f"{name}/pool",
            wire=f"{name}/wire",
            host=f"bytes {name}/host",
            storage_rate=f"bytes/s {name}/storage",
        )


class NodeRecorder:
    """Records what the agent of a node does. A step begins when ``now`` says so and ends with the call that records it.

    Args:
        recorder: Where it is kept.
        node: Id of the node.
    """

    def __init__(self, recorder: Recorder, node: str) -> None:
        self.now = recorder.now
        self._recorder = recorder
        self._tracks = NodeTracks.of(node)

    def read(self, begin_s: float, nbytes: int, *, file: str, verified: Verified) -> None:
        """A range of a file came from storage."""
        end_s, label = self.now(), masked(file)
        self._recorder.span(self._tracks.storage, "read", begin_s, nbytes=nbytes, label=label, end_s=end_s)
        if verified == "reference":
            # Summed while it was read: no time of its own.
            self._recorder.span(self._tracks.pool, "verify", end_s, nbytes=nbytes, label=label, end_s=end_s)

    def cut(self, begin_s: float, nbytes: int, *, block: int) -> None:
        """A block was cut, its segments summed."""
        self._recorder.span(self._tracks.pool, "cut", begin_s, nbytes=nbytes, label=f"block {block}")

    def put(self, begin_s: float, nbytes: int, *, block: int) -> None:
        """A block was put into the node's pool."""
        self._recorder.span(self._tracks.pool, "put", begin_s, nbytes=nbytes, label=f"block {block}")

    def fetched(self, begin_s: float, nbytes: int, *, block: int) -> None:
        """A block came from another node."""
        self._recorder.span(self._tracks.wire, "wire", begin_s, nbytes=nbytes, label=f"block {block}")

    def credit(self, used_bytes: int) -> None:
        """So much of the credit is in use from now on."""
        self._recorder.sample(self._tracks.host, used_bytes)

    def fault(self, fault: Fault) -> None:
        """Something went wrong and was dealt with."""
        self._recorder.mark(fault.kind, f"{fault.where}; {fault.action}")


class RankRecorder:
    """Records what a rank does, in the same way.

    Args:
        recorder: Where it is kept.
        rank: The rank.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.now = recorder.now
        self._recorder = recorder
        self._track = rank_track(rank)

    def copied(self, begin_s: float, nbytes: int, *, block: int) -> None:
        """A block was put in place."""
        self._recorder.span(self._track, "copy", begin_s, nbytes=nbytes, label=f"block {block}")

    def read(self, begin_s: float, read_bytes: int, *, placed_bytes: int, file: str) -> None:
        """The rank read an extent itself, and put what it needs of it in place."""
        end_s, label = self.now(), masked(file)
        self._recorder.span(self._track, "read", begin_s, nbytes=read_bytes, label=label, end_s=end_s)
        # Read into place, or put there as each piece came: no time of its own.
        self._recorder.span(self._track, "copy", end_s, nbytes=placed_bytes, label=label, end_s=end_s)

    def waited(self, begin_s: float) -> None:
        """The rank had nothing to do until blocks came."""
        self._recorder.span(self._track, "wait", begin_s)

    def fault(self, fault: Fault) -> None:
        """Something went wrong and was dealt with."""
        self._recorder.mark(fault.kind, f"{fault.where}; {fault.action}")
