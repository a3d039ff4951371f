"""What ``model.run`` gives to the user's function in each rank."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from megamind_ray.actors.rendezvous import meet
from megamind_ray.core.ids import ModelName, Rank
from megamind_ray.core.parallel import Coords, Parallel
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RankContext"]

_MESH_TIMEOUT: Final = timedelta(seconds=120)
# torch.distributed has one default process group per process; the model that made it.
_mesh_owner: ModelName | None = None
_mesh: DeviceMesh | None = None


class RankContext:
    """A rank, seen from inside.

    Attributes:
        model: Name of the model.
        rank: Rank in its mesh.
        coords: ``.tp``, ``.pp``, ``.dp``.
        parallel: The mesh.
        device: Where the tensors are.
        state_dict: The rank's tensors by module name. They are views of the arena: do not keep them longer than the
            model is loaded, except in ``state``, which is emptied with it.
        state: Yours; it stays from call to call.
    """

    def __init__(
        self,
        *,
        model: ModelName,
        rank: Rank,
        coords: Coords,
        parallel: Parallel,
        device: torch.device,
        state_dict: dict[str, torch.Tensor],
        state: dict[str, Any],
        rendezvous: str,
    ) -> None:
        self.model = model
        self.rank = rank
        self.coords = coords
        self.parallel = parallel
        self.device = device
        self.state_dict = state_dict
        self.state = state
        self._rendezvous = rendezvous

    @property
    def device_mesh(self) -> DeviceMesh:
        """A torch device mesh over the model's ranks, with dims ``pp``, ``dp``, ``tp``.

        The first use is collective: all ranks must reach it, within two minutes.

        Raises:
            RequestError: The process group of this worker belongs to another model, or was made by the user's code.
        """
        global _mesh, _mesh_owner
        if _mesh is None or _mesh_owner != self.model:
            _mesh, _mesh_owner = self._make_mesh(), self.model
        return _mesh

    def _make_mesh(self) -> DeviceMesh:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.is_initialized():
            owner = f"model {_mesh_owner!r}" if _mesh_owner else "other code"
            raise RequestError(
                f"model {self.model!r}: rank {self.rank}'s process has a process group of {owner} already, and torch "
                "allows one; use that one, or end it with torch.distributed.destroy_process_group()"
            )
        mesh = self.parallel
        store = meet(self._rendezvous, self.rank, mesh.world)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=mesh.world, timeout=_MESH_TIMEOUT)
        return init_device_mesh(self.device.type, (mesh.pp, mesh.dp, mesh.tp), mesh_dim_names=("pp", "dp", "tp"))
