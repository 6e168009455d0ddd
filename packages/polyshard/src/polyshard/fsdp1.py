"""Bridges to torch's own FSDP1 extension point, in both directions.

:func:`from_fsdp_extensions` makes a polyshard plugin of an existing ``FSDPExtensions`` object.
:func:`as_fsdp_extensions` makes an ``FSDPExtensions`` of a polyshard stack, for FSDP1 to use; wrap
the model inside :func:`wrapping_with`, because torch 2.13 reads the slot while it wraps and ignores
the documented setter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from polyshard._torch.fsdp1 import (
    FSDPExtensions,
    chunk_sharded_tensor,
    local_shards,
    set_extensions,
    wrapping_with,
)
from polyshard.errors import PluginError
from polyshard.plugins import hookspecs
from polyshard.plugins.contract import Contract, hookimpl
from polyshard.plugins.seams import ParamInfo
from polyshard.plugins.stack import PluginStack, build_stack

__all__ = [
    "StackExtensions",
    "as_fsdp_extensions",
    "from_fsdp_extensions",
    "set_extensions",
    "wrapping_with",
]


class ExtensionsPlugin:
    """An ``FSDPExtensions`` object as a plugin: it answers the six hooks for every parameter."""

    def __init__(self, extensions: FSDPExtensions, contract: Contract) -> None:
        """``extensions`` keeps its own state; one object may serve several stacks."""
        self._extensions = extensions
        self.polyshard_contract = contract

    @hookimpl
    def pre_flatten_transform(
        self, tensor: Tensor, param: ParamInfo | None
    ) -> tuple[Tensor, Any | None]:
        """As the object says; its tensor counts only with an extension, as in FSDP1.

        A gradient that autograd left with other placements is first brought to those of its
        parameter: FSDP1 hands over parameters only, so extensions need not look.
        """
        if param is not None and param.placements is not None and isinstance(tensor, DTensor):
            tensor = tensor.redistribute(placements=param.placements)
        flat, extension = self._extensions.pre_flatten_transform(tensor)
        return (tensor, None) if extension is None else (flat, extension)

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """The wrapped extension's answer."""
        return self._extensions.post_unflatten_transform(tensor, param_extension)

    @hookimpl
    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None,
    ) -> Tensor:
        """As the object says, ``device`` included, which FSDP1 itself never passes on."""
        return self._extensions.chunk_tensor(
            tensor, rank, world_size, num_devices_per_node, pg, device
        )

    @hookimpl
    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        """As the object says; where it cuts a dim twice, the engine makes placements strided."""
        return self._extensions.chunk_dtensor(tensor, rank, device_mesh)

    @hookimpl
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """The wrapped extension's answer."""
        return self._extensions.pre_load_state_dict_transform(tensor)

    @hookimpl
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> Tensor:
        """The wrapped extension's answer."""
        return self._extensions.all_gather_dtensor(tensor, parent_mesh)


def from_fsdp_extensions(
    extensions: FSDPExtensions, contract: Contract | None = None
) -> ExtensionsPlugin:
    """A plugin that answers the six hooks with ``extensions``.

    Args:
        extensions: any implementation of torch's abstract class.
        contract: its name and relations; by default named after its class.
    """
    return ExtensionsPlugin(extensions, contract or Contract(type(extensions).__name__))


class StackExtensions(FSDPExtensions):
    """A polyshard stack as FSDP1 sees it: all transforms as one, exclusive hooks resolved.

    Where no plugin answers, it does what FSDP1 does by itself.
    """

    def __init__(self, stack: PluginStack) -> None:
        """``stack`` must be built; no plugin is added later."""
        self._stack, self._transforms = stack, stack.transforms
        self.compute_stream: Any = None  # FSDP1 sets it on any extension it finds

    @override
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """Every layer in order; all extensions travel as one."""
        flat, extensions = self._transforms.flatten(tensor, None)
        return (flat, extensions) if any(e is not None for e in extensions) else (tensor, None)

    @override
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return self._transforms.unflatten(tensor, param_extension, None)

    @override
    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> Tensor:
        """As a plugin claims it, else cut on dim 0."""
        given = (rank, world_size, num_devices_per_node, pg)
        claimed = self._stack.claimed(hookspecs.chunk_tensor, tensor, *given, device, None)
        if claimed is not None:
            return claimed
        # A ShardedTensor takes contiguous shards only; a plugin may have unflattened into a view.
        return chunk_sharded_tensor(tensor.contiguous(), *given)

    @override
    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        """As a plugin claims it, else dim 0 over the last axis; scalars are repeated."""
        claimed = self._stack.claimed(hookspecs.chunk_dtensor, tensor, rank, device_mesh, None)
        if claimed is not None:
            return claimed
        placements: list[Placement] = [Replicate()] * device_mesh.ndim
        if tensor.ndim:
            placements[-1] = Shard(0)
        # Every rank holds the whole tensor already, so each cuts its own part.
        return distribute_tensor(tensor.detach(), device_mesh, placements, src_data_rank=None)

    @override
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """As a plugin claims it, else the tensor and its shards."""
        claimed = self._stack.claimed(hookspecs.pre_load_state_dict_transform, tensor, None)
        if claimed is not None:
            return claimed
        shards = local_shards(tensor)
        if shards is None:
            raise PluginError(
                f"a sharded state dict holds a {type(tensor).__name__} where a ShardedTensor was "
                "expected; load a state dict of the type that was saved."
            )
        return tensor, shards

    @override
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> Tensor:
        """As a plugin claims it, else gathered on every axis."""
        claimed = self._stack.claimed(hookspecs.all_gather_dtensor, tensor, parent_mesh, None)
        if claimed is not None:
            return claimed
        whole = [Replicate()] * tensor.device_mesh.ndim
        return tensor.redistribute(placements=whole).to_local()


def as_fsdp_extensions(plugins: Sequence[object | str]) -> StackExtensions:
    """The stack of ``plugins`` for FSDP1.

    Raises:
        PluginError, ConflictError: as ``fully_shard(plugins=...)`` would.
    """
    return StackExtensions(build_stack(plugins))
