"""Whose orders count."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from megamind_ray.actors.fencing import Epoch, Fence, SupersededError, bare, commanded
from megamind_ray.actors.gpu_worker import GpuWorker
from megamind_ray.actors.groups import by_order
from megamind_ray.actors.node_agent import NodeAgent
from megamind_ray.errors import ClusterError

OLD, NEW = Epoch(1, "a"), Epoch(2, "a")


class Door:
    def __init__(self) -> None:
        self.fence = Fence()

    @by_order("control")
    def open(self, wide: bool = False) -> str:
        return "wide" if wide else "open"


class Handle:
    """As Ray's: what is called is written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        handle = self

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> str:
                handle.calls.append((method, args, kwargs))
                return "ref"

        return Method()

    def __reduce__(self) -> tuple[type[Handle], tuple[()]]:
        return Handle, ()


def test_an_order_of_an_earlier_planner_is_refused_once_a_later_one_was_heard() -> None:
    door = Door()
    assert door.open(epoch=OLD) == "open"  # type: ignore[call-arg]
    assert door.open(True, epoch=NEW) == "wide"  # type: ignore[call-arg]
    with pytest.raises(SupersededError, match="epoch 1"):
        door.open(epoch=OLD)  # type: ignore[call-arg]
    assert door.fence.epoch == NEW
    assert door.open() == "open", "what has no epoch is no planner's"


def test_of_two_planners_that_began_at_once_one_counts() -> None:
    door = Door()
    door.open(epoch=Epoch(2, "b"))  # type: ignore[call-arg]
    with pytest.raises(SupersededError):
        door.open(epoch=Epoch(2, "a"))  # type: ignore[call-arg]


def test_who_was_told_to_leave_obeys_no_later_planner_either() -> None:
    """The planner that said so may be frozen before it ends the process."""
    door = Door()
    door.open(epoch=OLD)  # type: ignore[call-arg]
    door.fence.leave()
    with pytest.raises(ClusterError, match="told to leave"):
        door.open(epoch=NEW)  # type: ignore[call-arg]


def test_ray_lets_orders_say_their_epoch() -> None:
    """It holds calls to the signature of the innermost function that it finds."""
    assert "epoch" in inspect.signature(inspect.unwrap(Door.open)).parameters


@pytest.mark.parametrize("actor", [NodeAgent, GpuWorker])
def test_all_that_planners_call_is_fenced(actor: type) -> None:
    """Left out are what agents ask each other, what a client without a planner says, and the question for the epoch."""
    methods = {name: method for name, method in vars(actor).items() if not name.startswith("_")}
    free = {name for name, method in methods.items() if "epoch" not in inspect.signature(method).parameters}
    assert free == ({"exchange", "hand_kept", "epoch", "abandon"} if actor is NodeAgent else {"epoch"})


def test_a_commanded_handle_says_the_epoch_and_is_passed_on_without_it() -> None:
    handle = Handle()
    order = commanded(commanded(handle, OLD), NEW)
    assert order.close_load.remote("m#1", keep=True) == "ref"
    assert handle.calls == [("close_load", ("m#1",), {"keep": True, "epoch": NEW})]
    assert bare(order) is handle
    assert bare(handle) is handle
    assert type(pickle.loads(pickle.dumps(order))) is Handle
