"""What is said of a load that cannot be planned."""

from __future__ import annotations

from megamind_ray.actors.preparing import explained
from megamind_ray.core.ids import NodeId
from megamind_ray.errors import CapacityError, RequestError

LEAVING = [NodeId("ab" * 28), NodeId("cd" * 28)]


def test_nodes_that_are_leaving_are_named() -> None:
    error = explained(RequestError("dp=2 needs 2 GPUs, the cluster has 1"), LEAVING)

    assert type(error) is RequestError
    assert error.message == (
        "dp=2 needs 2 GPUs, the cluster has 1. Not used, since leaving: abababab, cdcdcdcd; "
        "`megamind drain NODE --cancel` takes a node back"
    )


def test_what_does_not_fit_keeps_its_figures() -> None:
    full = CapacityError("rank 0 needs 3 bytes", where="GPU a:0", needed_bytes=3, free_bytes=1)
    error = explained(full, LEAVING)

    assert isinstance(error, CapacityError)
    assert (error.where, error.missing_bytes) == ("GPU a:0", 2)
    assert error.message.startswith("rank 0 needs 3 bytes. Not used")


def test_where_nobody_leaves_the_error_stays_as_it_is() -> None:
    error = RequestError("no")

    assert explained(error, ()) is error
