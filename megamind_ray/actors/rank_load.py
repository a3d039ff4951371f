"""One load of one rank: direct reads on threads of their own, blocks from its node's agent meanwhile. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Final, Protocol

from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.messages import Delivery, ExtentFailure
from megamind_ray.config import DeadlineConfig
from megamind_ray.core.exchange import RANK_BATCH
from megamind_ray.core.ids import ExtentId, Generation, NodeId
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError, IntegrityError, MegamindError, RequestError, SourceError

__all__ = ["HomeAgent", "RankLoad"]

_STOP_S: Final = 1.0  # how long a stopped load waits for reads that are under way


class HomeAgent(Protocol):
    """The agent of the rank's node, as the rank sees it."""

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        """As ``AgentLoad.exchange``; None when the load has ended there.

        Raises:
            ClusterError: It does not answer.
        """

    def retire(self) -> None:
        """Tells it that the rank has all its blocks.

        Raises:
            ClusterError: It does not answer.
        """


class RankLoad:
    """Fills a session. ``receive`` is called once, on one thread; everything else from any.

    Attributes:
        session: What is filled.
        generation: Of the rank.
        failures: Direct extents that could not be read; their blocks are expected from the agent then.

    Args:
        session: What to fill.
        plane: How blocks are fetched.
        node: Where the rank lives.
        generation: Of the rank.
        deadlines: Of the load.
    """

    def __init__(
        self,
        session: RankSession,
        plane: DataPlane,
        *,
        node: NodeId,
        generation: Generation,
        deadlines: DeadlineConfig,
    ) -> None:
        self.session = session
        self.generation = generation
        self.deadlines = deadlines
        self.failures: list[ExtentFailure] = []
        self._plane = plane
        self._node = node
        self._broken: MegamindError | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._loaded = False

    def receive(self, agent: HomeAgent) -> None:
        """Goes on until nothing is missing, then publishes the session's tensors.

        Raises:
            ClusterError: It was stopped, or an actor is gone.
            MegamindError: The rank cannot be filled.
        """
        direct = threading.Thread(target=self._read_direct, name="direct-reads", daemon=True)
        direct.start()
        try:
            self._receive_all(agent, direct)
        finally:
            self.session.stop()
            direct.join(timeout=_STOP_S)
        self.session.finish()
        with self._lock:
            # Whoever stops the load now finds it loaded and frees it; whoever did so before this is obeyed here.
            self._raise_if_stopped()
            self._loaded = True

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stop.is_set()

    def stop(self) -> bool:
        """Ends ``receive``, which then raises; True if it has ended well already and there is something to free."""
        with self._lock:
            self._stop.set()
            self.session.stop()
            return self._loaded

    def _receive_all(self, agent: HomeAgent, direct: threading.Thread) -> None:
        from_pool = set(self.session.program.pool_blocks.tolist())
        acked: list[int] = []
        rejected: list[Delivery] = []
        while len(missing := self.session.missing_blocks):
            self._raise_if_stopped()
            if self._broken is not None:
                raise self._broken
            if self.failures or not from_pool.isdisjoint(missing.tolist()) or not direct.is_alive():
                acked, rejected = self._exchange(agent, acked, rejected)
            else:
                direct.join(timeout=self.deadlines.poll_s)
        agent.retire()

    def _exchange(
        self, agent: HomeAgent, acked: list[int], rejected: list[Delivery]
    ) -> tuple[list[int], list[Delivery]]:
        """Acks one batch and takes the next; returns what to ack and to reject with the next call."""
        begin, begin_s = perf_counter(), self.session.record.now()
        deliveries = agent.exchange(acked, rejected, limit=RANK_BATCH, timeout_s=self.deadlines.poll_s)
        self.session.record.waited(begin_s)
        if deliveries is None:
            rank = self.session.program.rank
            raise ClusterError(f"rank {rank}: the load ended on its node before all blocks had come")
        self.session.add_seconds("wait", perf_counter() - begin)
        arrived: list[int] = []
        damaged: list[Delivery] = []
        blocks = self._plane.get([one.handle for one in deliveries], timeout_s=self.deadlines.call_s)
        for delivery in deliveries:
            try:
                self.session.apply(delivery.block, blocks.pop(0), delivery.crc32s)
                arrived.append(delivery.serial)
            except IntegrityError:
                damaged.append(delivery)
        return arrived, damaged

    def _read_direct(self) -> None:
        try:
            self.session.read_direct(self._direct_failed, stop=self._stop)
        except MegamindError as error:
            self._broken = error
        except Exception as error:  # noqa: BLE001 - nobody is above this thread; ``receive`` raises it
            rank = self.session.program.rank
            self._broken = ClusterError(f"rank {rank}: reading its own extents: {type(error).__name__}: {error}")

    def _direct_failed(self, extent: int, error: MegamindError) -> None:
        retryable = isinstance(error, SourceError | IntegrityError | RequestError)
        self.failures.append(ExtentFailure(extent=ExtentId(extent), node=self._node, error=error, retryable=retryable))

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise ClusterError(f"rank {self.session.program.rank}: the load was stopped")
