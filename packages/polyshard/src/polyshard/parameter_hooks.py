"""The four exclusive hooks that concern one parameter's state-dict forms, with claims resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard.errors import ConflictError
from polyshard.onion import name_of
from polyshard.seams import ParamInfo

if TYPE_CHECKING:
    from polyshard.manager import Manager


class ParameterHooks:
    """Asks one plugin per parameter: whoever claims it, else the engine."""

    def __init__(self, manager: Manager, engine: str) -> None:
        """``engine`` is the name of the plugin whose answer yields to any other."""
        self._manager = manager
        self._engine = engine

    def _one(self, hook: str, param: ParamInfo | None, **arguments: Any) -> Any:
        claims = self._manager.ask(hook, leave_out=self._engine, param=param, **arguments)
        if len(claims) > 1:
            plugins = " and ".join(a.member.label for a in claims)
            raise ConflictError(
                f"plugins {plugins} both answer {hook} for {name_of(param)}. Pass only one of "
                "them, or narrow one so that it returns None for this parameter."
            )
        if not claims:  # only now: the engine need not understand what a plugin claims
            claims = self._manager.ask(hook, param=param, **arguments)
        return claims[0].value

    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
        param: ParamInfo | None = None,
    ) -> Tensor:
        """This rank's part of ``tensor`` as a ``ShardedTensor``."""
        answer: Tensor = self._one(
            "chunk_tensor",
            param,
            tensor=tensor,
            rank=rank,
            world_size=world_size,
            num_devices_per_node=num_devices_per_node,
            pg=pg,
            device=device,
        )
        return answer

    def chunk_dtensor(
        self, tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo | None = None
    ) -> DTensor:
        """``tensor`` sharded over ``device_mesh``."""
        answer = self._one(
            "chunk_dtensor", param, tensor=tensor, rank=rank, device_mesh=device_mesh
        )
        return cast("DTensor", answer)

    def all_gather_dtensor(
        self, tensor: DTensor, parent_mesh: DeviceMesh | None, param: ParamInfo | None = None
    ) -> Tensor:
        """The local tensor of ``tensor`` with data-parallel axes gathered."""
        answer = self._one("all_gather_dtensor", param, tensor=tensor, parent_mesh=parent_mesh)
        return cast("Tensor", answer)

    def pre_load_state_dict_transform(
        self, tensor: Tensor, param: ParamInfo | None = None
    ) -> tuple[Tensor, list[Any]]:
        """The tensor and local shards to load from."""
        answer: tuple[Tensor, list[Any]] = self._one(
            "pre_load_state_dict_transform", param, tensor=tensor
        )
        return answer
