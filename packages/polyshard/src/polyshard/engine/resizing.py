"""Units of a living model on another mesh.

[Note: resizing]
Modules, units, hooks and the parameter objects stay; groups are made anew. A new group plans for
the new mesh with the plugins of the old one, and its shards have memory without values, which the
caller fills. Until :meth:`Resizing.commit` the old groups are as they were, so that a failure costs
nothing but :meth:`Resizing.undo`. A rank that leaves gets groups on the meta device, which are
closed. Plugins see a new group: what they keep for one begins anew, as it does when a checkpoint
is loaded by another number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard._torch.private import root_mesh
from polyshard.engine.root import groups_of, units_below
from polyshard.engine.unit import RootContext
from polyshard.errors import LifecycleError, UnsupportedError
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import ShardedParameter, Source, placements_for
from polyshard.params.protocol_shards import ProtocolShards
from polyshard.sharding.mesh import MeshRoles
from polyshard.sharding.placement import Placed


@dataclass(frozen=True)
class Succession:
    """A group, and the one that takes its place."""

    before: ParameterGroup
    after: ParameterGroup


class Resizing:
    """A model on its way to another mesh. See [Note: resizing]."""

    def __init__(self, model: nn.Module) -> None:
        """Look whether ``model``, the outermost module, can be resized; it ends sharded.

        Raises:
            SettingError: when nothing of it is sharded.
            LifecycleError: in the middle of a step, or for a part of a model.
            UnsupportedError: naming what does not follow.
        """
        self.groups = groups_of(model)
        """As they are now, outermost units first."""
        self._units = [unit for _, _, unit in units_below(model)]
        self._made: list[Succession] = []
        for unit in self._units:
            if unit.is_root is False and unit.context.units[0] not in self._units:
                raise LifecycleError(f"unit '{unit.name}' is a part of a model; pass all of it.")
            if unit.context.reductions or unit.context.finalization.waits:
                raise LifecycleError("gradients are still being reduced; end the backward first.")
            unit.reshard()
        for group in self.groups:
            _check(group, self.groups[0])

    def build(self, mesh: DeviceMesh | None) -> Iterator[Succession]:
        """Make the groups one after another: on ``mesh`` without values, or on the meta device.

        Registers the parameters of new groups with the modules.

        Args:
            mesh: 1-D, with this rank; ``None`` on a rank that is to hold nothing.
        """
        for group in self.groups:
            roles = group.roles if mesh is None else replace(group.roles, mesh=mesh)
            sources = [
                _source(p, group, index, roles) for index, p in enumerate(group.shards.parameters)
            ]
            made = ParameterGroup(sources, group.stack, group.name, None)
            succession = Succession(group, made)
            self._made.append(succession)  # first: undo() puts back what shard() registers
            made.shard()
            made.take_settings(group)
            made.take_originals()  # the parameters stay
            if mesh is not None:
                made.take_memory(roles.device)
            _check_objects(succession)
            yield succession

    def undo(self) -> None:
        """Give up what was made, complete or not."""
        for one in self._made:
            one.before.shards.registry.register()
            one.after.close()
        self._made.clear()

    def commit(self) -> None:
        """Have the new groups, complete, take the places of the old ones, which are closed.

        The next forward compares plans, as the first one did. Gradients are not taken along.
        """
        heirs = {one.before: one.after for one in self._made}
        mesh = self._made[0].after.roles.mesh
        for before, after in heirs.items():
            after.shards.take_objects([p.parameter for p in before.shards.parameters])
        roots = {unit.context for unit in self._units if unit.is_root is not False}
        for unit in self._units:
            for held in (unit.groups, unit.borrowed):
                held[:] = [heirs[group] for group in held]
            unit.roles = replace(unit.roles, mesh=mesh)
            unit.initial_values = ()
            if unit.is_root is False:
                unit.context = RootContext()
            unit.is_root = None
        for context in roots:
            context.begin_anew()
        for before, after in heirs.items():
            before.close()
            if after.shards.is_vacant:
                after.close()


def _check_objects(one: Succession) -> None:
    """Refuse parameter objects that cannot change their device. See ``become``.

    Raises:
        LifecycleError: naming one.
    """
    every = zip(one.before.shards.parameters, one.after.shards.parameters, strict=True)
    for kept, made in every:
        is_elsewhere = kept.parameter.device != made.parameter.device
        if is_elsewhere and weakref.getweakrefcount(kept.parameter):
            raise LifecycleError(
                f"'{kept.info.fqn}' moves to or from the meta device, which torch refuses because "
                "weak references to the parameter exist. Drop them, or keep names instead."
            )


def _source(
    parameter: ShardedParameter, group: ParameterGroup, index: int, roles: MeshRoles
) -> Source:
    """What a new group is made of: the parameter without values, and without facts about them."""
    shape, dtype = group.shards.layout.parameters[index].shape, group.shards.dtype
    return Source(
        replace(parameter.current_info, mesh=roles.mesh, facts=()),
        parameter.parameter,
        parameter.owners,
        Placed(parameter.dim, roles),
        torch.empty(shape, dtype=dtype, device="meta"),
        parameter.extensions,
        policy=group.policy,
    )


def _check(group: ParameterGroup, first: ParameterGroup) -> None:
    """Refuse what cannot follow.

    Raises:
        LifecycleError: when gradients wait.
        UnsupportedError: for everything else.
    """
    parameters, roles = group.shards.parameters, group.roles
    if group.gradients.waiting or any(p.parameter.grad is not None for p in parameters):
        raise LifecycleError(
            f"group '{group.name}' has gradients, which are not moved: step the optimizer and call "
            "optimizer.zero_grad() first."
        )
    refusal = None
    if root_mesh(roles.mesh).ndim > 1:
        refusal = f"its mesh has several axes ({root_mesh(roles.mesh)})"
    elif roles.ranks != first.roles.ranks:
        refusal = "it has a mesh of its own"
    elif group.block_size is not None:
        refusal = f"reshard_after_forward={group.block_size} divides its ranks into blocks"
    elif isinstance(group.shards, ProtocolShards):
        refusal = "its tensors bring FSDP2's all-gather protocol"
    elif group.shards.layout.owners:
        refusal = "its gradients land on owners"
    elif any(p.spec.placements != placements_for(p.dim, roles) for p in parameters):
        refusal = "a plugin placed its parameters"
    if refusal is not None:
        raise UnsupportedError(
            f"group '{group.name}' cannot be resized: {refusal}. Save a checkpoint, and load it "
            "with the new number of ranks."
        )
