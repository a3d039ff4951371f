"""Whether a placement can be done by a deadline, whoever reads: all resources weighed together.

Seconds of the busiest resource are no less than any weighted mean of the seconds of all. For given weights it is easy
to see how small that mean can be, since readers of one share do not matter for another one. So weights for which the
smallest mean is beyond the deadline are a proof, however they were found (docs/design/0020).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megamind_ray.policies.costs import Float64Array, TransferCosts
from megamind_ray.policies.placement.item_bytes import ItemBytes

__all__ = ["Weighing"]

_TINY = 1e-12
_EVERY = 8
_ROUNDING = 1e-6
Flags = npt.NDArray[np.bool_]


class Weighing:
    """A placement, or a part of one.

    Args:
        costs: What it takes.
        load: The bytes.
        shares: ``[share]``, those that are looked at: of which all nodes that need some are known, two or more.
        needs: ``[part, node]``, who needs what.
        busy: ``[node, kind]``, seconds of what is done there in any case.
        crossing: ``[node]``, bytes that a node reads in any case.
    """

    def __init__(
        self,
        costs: TransferCosts,
        load: ItemBytes,
        shares: Flags,
        needs: Flags,
        busy: Float64Array,
        crossing: Float64Array,
    ) -> None:
        self._costs, self._shape = costs, busy.shape
        kept, num_racks = np.flatnonzero(shares), len(costs.uplink)
        chosen = np.flatnonzero(shares[load.part_share])
        self._nbytes = load.share_bytes[kept]
        self._strided = load.strided_bytes[kept]
        self._needs = needs[chosen]
        self._part_bytes = load.part_bytes[chosen]
        owner = np.zeros((len(kept), len(chosen)))
        owner[np.searchsorted(kept, load.part_share[chosen]), np.arange(len(chosen))] = self._part_bytes
        self._member = (owner @ self._needs) > 0
        self._in_rack = np.zeros((busy.shape[0], num_racks))
        self._in_rack[np.arange(busy.shape[0]), costs.rack] = 1.0
        by_rack = (self._needs @ self._in_rack) > 0
        # By share and node, or rack: what it needs, and what nobody else does.
        self._need = owner @ self._needs
        self._own = owner @ (self._needs & (self._needs.sum(axis=1, keepdims=True) == 1))
        self._rack_need = owner @ by_rack
        self._rack_own = owner @ (by_rack & (by_rack.sum(axis=1, keepdims=True) == 1))
        # As all read equally much, a rack takes something in and sends something; if not, that is not counted.
        equal = self._member / np.maximum(self._member.sum(axis=1, keepdims=True), 1) * self._nbytes[:, None]
        inside = equal @ self._in_rack
        self._comes_in = (self._rack_need > inside) * 1.0
        self._goes_out = (inside > self._rack_own) * 1.0
        self._relayed = np.flatnonzero(self._needs.sum(axis=1) > 2)
        self._given = self._all(busy, *self._crossed(crossing))

    def _all(self, nodes: Float64Array, rack_in: Float64Array, rack_out: Float64Array) -> Float64Array:
        return np.concatenate([nodes.reshape(-1), rack_in * self._costs.uplink, rack_out * self._costs.uplink])

    def _crossed(self, read: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Bytes over uplinks, in and out, for what nodes read of storage."""
        costs, crossing = self._costs, read * self._costs.crosses
        out = np.zeros(len(costs.uplink))
        if costs.storage_rack >= 0:
            out[costs.storage_rack] = crossing.sum()
        return crossing @ self._in_rack, out

    def refutes(self, late_s: float, weights: Float64Array | None, rounds: int) -> Float64Array | None:
        """Weights for which the mean is beyond a deadline whoever reads; None where none are found.

        Args:
            late_s: The deadline.
            weights: To try first.
            rounds: How many others to try then.
        """
        if weights is not None and self._is_beyond(late_s, weights):
            return weights
        # What is busiest if readers are those of all weights before, each a little; and those weights' own mean.
        mean = np.maximum(self._given, _TINY)
        among = np.zeros_like(mean)
        for turn in range(rounds):
            tried = (mean / mean.max()) ** (10 + 4 * turn**0.5)
            tried /= tried.sum()
            step = 2 / (turn + 2)
            used = self._least(tried)
            if float(tried @ used) * (1 - _ROUNDING) > late_s:
                return np.asarray(tried)
            mean = np.maximum((1 - step) * mean + step * used, _TINY)
            among = (1 - step) * among + step * tried
            if turn % _EVERY == _EVERY - 1 and self._is_beyond(late_s, among):
                return np.asarray(among)
        return None

    def _is_beyond(self, late_s: float, weights: Float64Array) -> bool:
        return float(weights @ self._least(weights)) * (1 - _ROUNDING) > late_s * float(weights.sum())

    def _least(self, weights: Float64Array) -> Float64Array:
        """By resource, seconds with the readers for whom the weighted mean is smallest."""
        costs, num_racks = self._costs, len(self._costs.uplink)
        nodes = weights[: len(weights) - 2 * num_racks].reshape(self._shape)
        into, out = weights[-2 * num_racks : -num_racks] * costs.uplink, weights[-num_racks:] * costs.uplink
        from_storage = into[costs.rack] + (out[costs.storage_rack] if costs.storage_rack >= 0 else 0.0)
        read = ((costs.read + costs.pack) * nodes).sum(axis=1) + from_storage * costs.crosses
        take, send = (costs.take * nodes).sum(axis=1), (costs.send * nodes).sum(axis=1)
        # For each byte that a node reads: first of what it alone needs, then of what it needs, then of other bytes.
        slope = read - (self._comes_in * into)[:, costs.rack] + (self._goes_out * out)[:, costs.rack]
        slopes = np.concatenate([slope - take, slope - take + send, slope + send], axis=1)
        limit = np.where(self._member, self._nbytes[:, None], 0.0)
        lengths = np.concatenate([self._own, self._need - self._own, limit - self._need], axis=1)
        order = np.argsort(np.where(lengths > 0, slopes, np.inf), axis=1, kind="stable")
        sorted_lengths = np.take_along_axis(lengths, order, axis=1)
        before = np.cumsum(sorted_lengths, axis=1) - sorted_lengths
        filled = np.clip(self._nbytes[:, None] - before, 0.0, sorted_lengths)
        amounts = np.zeros_like(lengths)
        np.put_along_axis(amounts, order, filled, axis=1)
        own, needed, other = np.split(amounts, 3, axis=1)
        x = own + needed + other
        sent = (needed + other).sum(axis=0)
        rack_in, rack_out = self._crossed(x.sum(axis=0))
        inside = x @ self._in_rack
        rack_in += (self._comes_in * (self._rack_need - inside)).sum(axis=0)
        rack_out += (self._goes_out * (inside - self._rack_own)).sum(axis=0)
        for part in self._relayed.tolist():
            self._hand_on(part, send, out, sent, rack_out)
        seconds = x.sum(axis=0)[:, None] * (costs.read + costs.pack)
        seconds += (self._need - own - needed).sum(axis=0)[:, None] * costs.take + sent[:, None] * costs.send
        if costs.cut is not None and len(self._nbytes):
            cheapest = np.where(self._member, (costs.cut * nodes).sum(axis=1), np.inf).argmin(axis=1)
            np.add.at(seconds, cheapest, self._strided[:, None] * costs.cut[cheapest])
        return self._given + self._all(seconds, rack_in, rack_out)

    def _hand_on(
        self, part: int, send: Float64Array, out: Float64Array, sent: Float64Array, rack_out: Float64Array
    ) -> None:
        """Adds what nodes, and racks, send of a part because they stand between two others that need it."""
        members, rack = np.flatnonzero(self._needs[part]), self._costs.rack
        saved = send[members] + out[rack[members]]
        pairs = saved[:, None] + saved[None, :]
        pairs -= np.where(rack[members][:, None] == rack[members][None, :], out[rack[members]][:, None], 0.0)
        np.fill_diagonal(pairs, -np.inf)
        one, other = divmod(int(pairs.argmax()), len(members))
        ends = members[[one, other]]
        nbytes = self._part_bytes[part]
        sent[np.setdiff1d(members, ends)] += nbytes
        racks = np.setdiff1d(rack[members], rack[ends])
        rack_out[racks] += nbytes
