"""The bytes of a load by the items that need them: ranks that stay on one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.costs import Float64Array, TransferLoad, sums
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.locality import Group

__all__ = ["ItemBytes"]


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """What items need. A *share* is bytes that the same items need some of.

    Attributes:
        copied: ``[item]``, to devices.
        rank_bytes: ``[item]``, to the device of its smallest rank.
        needs: ``[item, part]``, whether it needs a part; parts that the same items of a share need are one.
        part_share: ``[part]``.
        part_bytes: ``[part]``.
        share_bytes: ``[share]``, distinct bytes that are read.
        pooled_bytes: ``[share]``, those of them that are packed.
        strided_bytes: ``[share]``, those of these that are surely cut out of strides for it.
        wants: ``[share, item]``.
    """

    copied: Float64Array
    rank_bytes: Float64Array
    needs: npt.NDArray[np.bool_]
    part_share: Int64Array
    part_bytes: Float64Array
    share_bytes: Float64Array
    pooled_bytes: Float64Array
    strided_bytes: Float64Array
    wants: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, load: TransferLoad, request: PlacementRequest, items: Sequence[Group]) -> ItemBytes:
        num = len(items)
        item_of = np.zeros(request.parallel.world, np.int64)
        for index, item in enumerate(items):
            item_of[list(item.ranks)] = index
        part, rank = load.members()
        to_device = sums(rank, load.part_bytes[part], request.parallel.world)
        direct = load.is_direct(part, rank)
        by_part = np.zeros((len(load.part_bytes), num), np.bool_)
        by_part[part, item_of[rank]] = True
        by_class = np.zeros((len(load.class_bytes), num), np.bool_)
        np.logical_or.at(by_class, load.part_class, by_part)
        wants, share_of = np.unique(by_class, axis=0, return_inverse=True)
        share_of = share_of.reshape(-1)
        keys = np.concatenate([share_of[load.part_class][:, None], by_part.astype(np.int64)], axis=1)
        kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
        return cls(
            copied=sums(item_of, to_device, num),
            rank_bytes=np.array([to_device[list(item.ranks)].min() for item in items]),
            needs=kinds[:, 1:].astype(np.bool_).T.copy(),
            part_share=kinds[:, 0].astype(np.int64),
            part_bytes=sums(kind_of.reshape(-1), load.part_bytes, len(kinds)),
            share_bytes=sums(share_of, load.class_bytes, len(wants)),
            pooled_bytes=sums(share_of, load.class_bytes * ~direct, len(wants)),
            strided_bytes=np.zeros(len(wants))
            if load.strided_bytes is None
            else sums(share_of, load.strided_bytes * ~direct, len(wants)),
            wants=wants,
        )
