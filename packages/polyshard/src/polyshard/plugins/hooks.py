"""The hooks of one stack as typed functions: the only file that calls the manager.

Each method asks every plugin that implements the hook, in plugin order, the engine last, and gives
the answers with the names of those who gave them. Who may answer, and how answers combine, is for
the callers (:mod:`~polyshard.plugins.claims`, :mod:`~polyshard.plugins.transforms`, and
:class:`ParameterHooks` for the four exclusive hooks about one parameter).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from polyshard.errors import ConflictError
from polyshard.plugins.manager import Answer, Implementation, Manager, Member
from polyshard.plugins.transforms import name_of
from polyshard.seams import (
    CollectivesBackend,
    GatherCodec,
    GroupInfo,
    Observer,
    ParamInfo,
    ReduceCodec,
    ShardingConstraint,
    StateDictAdapter,
    StorageFactory,
)


class Hooks:
    """What :mod:`polyshard.plugins.hookspecs` says, callable. ``None`` answers are left out."""

    def __init__(self, manager: Manager) -> None:
        """``manager`` holds the plugins of the stack, in order."""
        self._manager = manager

    def layers(self) -> list[tuple[Member, Implementation, Implementation]]:
        """Each plugin that transforms parameters, with its two functions.

        They are called during steps, without the manager.
        """
        flattening = self._manager.implementations("pre_flatten_transform")
        unflattening = self._manager.implementations("post_unflatten_transform")
        undo = {id(i.member): i for i in unflattening}
        return [(i.member, i, undo[id(i.member)]) for i in flattening]

    # --- per module ---------------------------------------------------------------------------

    def prepare_model(self, module: nn.Module, mesh: DeviceMesh) -> list[Answer[object]]:
        """``polyshard_prepare_model``."""
        return self._manager.ask("polyshard_prepare_model", module=module, mesh=mesh)

    # --- per group ----------------------------------------------------------------------------

    def sharding_constraints(self, group: GroupInfo) -> list[Answer[ShardingConstraint]]:
        """``polyshard_sharding_constraint``."""
        return self._manager.ask("polyshard_sharding_constraint", group=group)

    def shard_storages(self, group: GroupInfo) -> list[Answer[StorageFactory]]:
        """``polyshard_shard_storage``."""
        return self._manager.ask("polyshard_shard_storage", group=group)

    def collectives_backends(self, group: GroupInfo) -> list[Answer[CollectivesBackend]]:
        """``polyshard_collectives_backend``."""
        return self._manager.ask("polyshard_collectives_backend", group=group)

    def gather_codecs(self, group: GroupInfo) -> list[Answer[GatherCodec]]:
        """``polyshard_gather_codec``."""
        return self._manager.ask("polyshard_gather_codec", group=group)

    def reduce_codecs(self, group: GroupInfo) -> list[Answer[ReduceCodec]]:
        """``polyshard_reduce_codec``."""
        return self._manager.ask("polyshard_reduce_codec", group=group)

    def observers(self, group: GroupInfo) -> list[Answer[Observer]]:
        """``polyshard_observer``."""
        return self._manager.ask("polyshard_observer", group=group)

    def state_dict_adapters(self, group: GroupInfo) -> list[Answer[StateDictAdapter]]:
        """``polyshard_state_dict_adapter``."""
        return self._manager.ask("polyshard_state_dict_adapter", group=group)

    def parameter_facts(self, tensor: Tensor, param: ParamInfo) -> list[Answer[str]]:
        """``polyshard_parameter_facts``."""
        return self._manager.ask("polyshard_parameter_facts", tensor=tensor, param=param)

    # --- per parameter ------------------------------------------------------------------------
    # The engine is asked apart: it need not understand what a plugin claims.

    def chunk_tensor(  # noqa: PLR0913  (torch's arguments)
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None,
        param: ParamInfo | None,
        *,
        leave_out: str = "",
    ) -> list[Answer[Tensor]]:
        """``chunk_tensor``; the plugin named ``leave_out`` is not asked."""
        return self._manager.ask(
            "chunk_tensor",
            leave_out=leave_out,
            tensor=tensor,
            rank=rank,
            world_size=world_size,
            num_devices_per_node=num_devices_per_node,
            pg=pg,
            device=device,
            param=param,
        )

    def chunk_dtensor(
        self,
        tensor: Tensor,
        rank: int,
        device_mesh: DeviceMesh,
        param: ParamInfo | None,
        *,
        leave_out: str = "",
    ) -> list[Answer[DTensor]]:
        """``chunk_dtensor``; the plugin named ``leave_out`` is not asked."""
        return self._manager.ask(
            "chunk_dtensor",
            leave_out=leave_out,
            tensor=tensor,
            rank=rank,
            device_mesh=device_mesh,
            param=param,
        )

    def all_gather_dtensor(
        self,
        tensor: DTensor,
        parent_mesh: DeviceMesh | None,
        param: ParamInfo | None,
        *,
        leave_out: str = "",
    ) -> list[Answer[Tensor]]:
        """``all_gather_dtensor``; the plugin named ``leave_out`` is not asked."""
        return self._manager.ask(
            "all_gather_dtensor",
            leave_out=leave_out,
            tensor=tensor,
            parent_mesh=parent_mesh,
            param=param,
        )

    def pre_load_state_dict_transform(
        self, tensor: Tensor, param: ParamInfo | None, *, leave_out: str = ""
    ) -> list[Answer[tuple[Tensor, list[Any]]]]:
        """``pre_load_state_dict_transform``; the plugin named ``leave_out`` is not asked."""
        return self._manager.ask(
            "pre_load_state_dict_transform", leave_out=leave_out, tensor=tensor, param=param
        )


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
