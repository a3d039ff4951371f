"""Which node is meant by what a person typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamind_ray.core.ids import NodeId
from megamind_ray.core.tracks import short_node
from megamind_ray.errors import RequestError, listed

__all__ = ["NodeNames", "find_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNames:
    """What a node is called.

    Attributes:
        node: Ray's id of it, which ``megamind topology`` shows.
        address: IP address.
        host: Name of its host.
    """

    node: NodeId
    address: str
    host: str = ""

    def __str__(self) -> str:
        return f"{short_node(self.node)} ({', '.join(filter(None, (self.host, self.address)))})"


def find_node(text: str, nodes: Sequence[NodeNames]) -> NodeId:
    """The node with this id, address or host name, or whose id begins so.

    Args:
        text: What was typed.
        nodes: Those that there are.

    Raises:
        RequestError: None, or several; the text lists them.
    """
    wanted = text.strip()
    for found in (
        [one for one in nodes if one.node == wanted],
        [one for one in nodes if wanted in (one.address, one.host)] if wanted else [],
        [one for one in nodes if one.node.startswith(wanted)] if wanted else [],
    ):
        if len(found) == 1:
            return found[0].node
        if found:
            raise RequestError(
                f"node {text!r:.80}: it may be any of {len(found)}: {listed([str(one) for one in found])}; "
                "give the first digits of its id that no other has"
            )
    raise RequestError(
        f"node {text!r:.80}: the cluster has none of this id, address or name; it has "
        f"{listed([str(one) for one in nodes]) or 'none at all'}"
    )
