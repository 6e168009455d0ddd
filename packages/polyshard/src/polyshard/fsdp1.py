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
from torch.distributed.tensor import DTensor
from typing_extensions import override

from polyshard._torch.fsdp1 import FSDPExtensions, set_extensions, wrapping_with
from polyshard.plugins.stack import PluginStack, build_stack
from polyshard.plugins.contract import Contract, hookimpl
from polyshard.plugins.seams import ParamInfo

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
    """A polyshard stack as FSDP1 sees it: the onion as one transform, exclusive hooks resolved."""

    def __init__(self, stack: PluginStack) -> None:
        """``stack`` must be built; no plugin is added later."""
        self._onion = stack.onion
        self._hooks = stack.parameter_hooks
        self.compute_stream: Any = None  # FSDP1 sets it on any extension it finds

    @override
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """Every layer in order; all extensions travel as one."""
        flat, extensions = self._onion.flatten(tensor, None)
        return (flat, extensions) if any(e is not None for e in extensions) else (tensor, None)

    @override
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return self._onion.unflatten(tensor, param_extension, None)

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
        """Whoever claims it, else as FSDP1."""
        return self._hooks.chunk_tensor(
            tensor, rank, world_size, num_devices_per_node, pg, device, None
        )

    @override
    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        """Whoever claims it, else sharded on dim 0."""
        return self._hooks.chunk_dtensor(tensor, rank, device_mesh, None)

    @override
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Whoever claims it, else the tensor and its shards."""
        return self._hooks.pre_load_state_dict_transform(tensor, None)

    @override
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> Tensor:
        """Whoever claims it, else gathered on every axis."""
        return self._hooks.all_gather_dtensor(tensor, parent_mesh, None)


def as_fsdp_extensions(plugins: Sequence[object | str]) -> StackExtensions:
    """The stack of ``plugins`` for FSDP1.

    Raises:
        PluginError, ConflictError: as ``fully_shard(plugins=...)`` would.
    """
    return StackExtensions(build_stack(plugins))
