"""The four exclusive hooks that concern one parameter's state-dict forms, with claims resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard.errors import ConflictError
from polyshard.hooks import Hooks
from polyshard.manager import Answer
from polyshard.onion import name_of
from polyshard.seams import ParamInfo

T = TypeVar("T")


class ParameterHooks:
    """Asks one plugin per parameter: whoever claims it, else the engine."""

    def __init__(self, hooks: Hooks, engine: str) -> None:
        """``engine`` is the name of the plugin whose answer yields to any other."""
        self._hooks = hooks
        self._engine = engine

    def _claim(
        self, hook: str, param: ParamInfo | None, ask: Callable[[str], list[Answer[T]]]
    ) -> T | None:
        """The answer of the only plugin that has one."""
        claims = ask(self._engine)
        if len(claims) > 1:
            plugins = " and ".join(a.member.label for a in claims)
            raise ConflictError(
                f"plugins {plugins} both answer {hook} for {name_of(param)}. Pass only one of "
                "them, or narrow one so that it returns None for this parameter."
            )
        return claims[0].value if claims else None

    def _one(self, hook: str, param: ParamInfo | None, ask: Callable[[str], list[Answer[T]]]) -> T:
        claim = self._claim(hook, param, ask)
        # Only now: the engine need not understand what a plugin claims.
        return ask("")[0].value if claim is None else claim

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
        given = (tensor, rank, world_size, num_devices_per_node, pg, device, param)
        return self._one(
            "chunk_tensor", param, lambda name: self._hooks.chunk_tensor(*given, leave_out=name)
        )

    def chunk_dtensor(
        self, tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo | None = None
    ) -> DTensor:
        """``tensor`` sharded over ``device_mesh``."""
        given = (tensor, rank, device_mesh, param)
        return self._one(
            "chunk_dtensor", param, lambda name: self._hooks.chunk_dtensor(*given, leave_out=name)
        )

    def claimed_dtensor(
        self, tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo
    ) -> DTensor | None:
        """What a plugin makes of ``tensor`` sharded over ``device_mesh``; ``None`` if none does."""
        given = (tensor, rank, device_mesh, param)
        return self._claim(
            "chunk_dtensor", param, lambda name: self._hooks.chunk_dtensor(*given, leave_out=name)
        )

    def all_gather_dtensor(
        self, tensor: DTensor, parent_mesh: DeviceMesh | None, param: ParamInfo | None = None
    ) -> Tensor:
        """The local tensor of ``tensor`` with data-parallel axes gathered."""
        given = (tensor, parent_mesh, param)
        return self._one(
            "all_gather_dtensor",
            param,
            lambda name: self._hooks.all_gather_dtensor(*given, leave_out=name),
        )

    def pre_load_state_dict_transform(
        self, tensor: Tensor, param: ParamInfo | None = None
    ) -> tuple[Tensor, list[Any]]:
        """The tensor and local shards to load from."""
        return self._one(
            "pre_load_state_dict_transform",
            param,
            lambda name: self._hooks.pre_load_state_dict_transform(tensor, param, leave_out=name),
        )
