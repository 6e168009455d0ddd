"""Settings of how a sharded module communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from typing_extensions import override

from polyshard.errors import SettingError
from polyshard.group.dtypes import has_no_buffers
from polyshard.memory.streams import streams_of
from polyshard.module.schedule import own_groups, root_unit
from polyshard.transport.custom import AllGather, ReduceScatter


class CommunicationSettings(TorchFSDPModule):
    """Setters of who moves bytes, and what is done to gradients on the way."""

    @override
    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Have ``hook`` change this unit's reduced gradients before they are stored.

        It gets each group's averaged shard (flat, reduce dtype), after any all-reduce, in the order
        of the reductions. Several groups of a unit each call it (torch refuses those).

        Args:
            hook: changes its argument in place.
            stream: runs the hook there; the current stream waits for it.

        Raises:
            SettingError: for a stream where replicas are reduced too, which has its own place.
        """
        if stream is not None and any(
            g.roles.is_replicated for g in own_groups(self, recurse=False)
        ):
            raise SettingError(
                "set_all_reduce_hook(stream=) is for units without a replicate axis: with one, the "
                "hook runs where its all-reduce does. Leave stream out."
            )
        for group in own_groups(self, recurse=False):
            wanted = hook if stream is None else _on_stream(hook, stream)
            group.reduce_settings = replace(group.reduce_settings, hook=wanted)

    @override
    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward of the root wait for ``event`` before anything is gathered.

        The compute stream waits, which is always right; gathers then wait for the compute stream.
        Without streams (CPU) there is nothing to wait for.

        Raises:
            LifecycleError: on a module that is not the root.
        """
        unit = root_unit(self, "set_post_optim_event")
        unit.context.post_optim_event = event

    @override
    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have ``comm`` gather this unit's parameters, through one flat buffer it allocates."""
        for group in own_groups(self, recurse=False):
            group.set_comms(replace(group.comms, all_gather=comm))

    @override
    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have ``comm`` reduce this unit's gradients, through one flat buffer it allocates.

        The next forward raises ``CustomCommsError`` where a plugin moves gradients by itself.
        """
        for group in own_groups(self, recurse=False):
            group.set_comms(replace(group.comms, reduce_scatter=comm))

    @override
    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Whether reductions get a communicator of their own.

        Only collectives queue behind each other; on gloo messages do not, and nothing changes.
        """
        for group in own_groups(self, recurse):
            group.transport.separate_reductions(enable)

    @override
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect, and a warning: transfers use parameters and gradients where they rest.

        Raises:
            CustomCommsError: after :meth:`set_custom_all_gather` or its like.
        """
        setter = "set_allocate_memory_from_process_group_for_comm"
        has_no_buffers(setter, [g.comms for g in own_groups(self, recurse=False)], enable)

    @override
    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """As :meth:`set_allocate_memory_from_process_group_for_comm`."""
        del backend
        has_no_buffers("set_symm_mem_for_comm", [g.comms for g in own_groups(self, recurse=False)])


def _on_stream(
    hook: Callable[[torch.Tensor], None], stream: torch.cuda.Stream
) -> Callable[[torch.Tensor], None]:
    def run(gradient: torch.Tensor) -> None:
        streams = streams_of(gradient.device)
        if streams is None:
            hook(gradient)
            return
        current = streams.current()
        stream.wait_stream(current)
        with streams.on(stream):
            hook(gradient)
        current.wait_stream(stream)

    return run
