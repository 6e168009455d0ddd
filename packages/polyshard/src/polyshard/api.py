"""``fully_shard``, and what else is done to a module before it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard._torch.engine_state import EngineState, register_sharded, show_to_torch
from polyshard._torch.newer import warn_if_untested
from polyshard._torch.private import tag_managed_module
from polyshard.agreement.meeting import reporting
from polyshard.engine.collect import (
    Collector,
    check_modules,
    move_to_device,
    split_by_kind,
)
from polyshard.engine.hooks import UnitHooks
from polyshard.engine.initial_values import initial_values
from polyshard.engine.plans import audiences
from polyshard.engine.root import group_names, unit_of
from polyshard.engine.state_dict import StateDictHooks
from polyshard.engine.ties import adopt_shared, mark
from polyshard.engine.unit import Unit
from polyshard.errors import AlreadyShardedError, SettingError, UnsupportedError
from polyshard.group.group import ParameterGroup
from polyshard.module import FSDPModule, mix_in
from polyshard.module.schedule import own_unit
from polyshard.params.parameter import Source
from polyshard.plugins.discovery import stand_in
from polyshard.plugins.stack import PluginStack, build_stack
from polyshard.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from polyshard.sharding.mesh import MeshRoles, resolve_mesh
from polyshard.sharding.placement import PlacementFunction

logger = logging.getLogger("polyshard")
M = TypeVar("M", bound=nn.Module)


def with_policy(plugins: Sequence[object | str], policy: object) -> Sequence[object | str]:
    """Return ``plugins`` and the plugin that implements ``policy``.

    Raises:
        UnsupportedError: for an unknown policy, or when the plugin is not installed.
        PluginError: when what is installed under its name is something else.
    """
    if type(policy) is OffloadPolicy or isinstance(plugins, str):
        return plugins
    if not isinstance(policy, CPUOffloadPolicy):
        raise UnsupportedError(
            f"offload_policy {policy!r} is not known to polyshard; offloading is a plugin."
        )
    purpose = "implement offload_policy=CPUOffloadPolicy()"
    plugin = stand_in("offload", "for_policy", purpose, policy)
    if plugin is None:
        raise UnsupportedError(
            "offload_policy=CPUOffloadPolicy() needs a plugin for offload: pip install "
            "polyshard-offload; it will be found. For more choices pass plugins=[Offload(...)]."
        )
    return [*plugins, plugin]


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    plugins: Sequence[object | str] = ...,
) -> M: ...


@overload
def fully_shard(
    module: list[M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    plugins: Sequence[object | str] = ...,
) -> list[M]: ...


def fully_shard(
    module: M | list[M],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    plugins: Sequence[object | str] = (),
) -> M | list[M]:
    """Shard ``module``'s parameters, gradients and optimizer state over data-parallel ranks.

    Takes every keyword of ``torch.distributed.fsdp.fully_shard`` with the same meaning, plus
    ``plugins``. Works in place and bottom-up: each call makes one *unit* of the parameters that no
    earlier call on a submodule took.

    Args:
        module: a module, or several that form one unit: gathered before the first one's forward,
            freed after the last one's.
        mesh: 1-D (shard) or 2-D (replicate, shard) device mesh; default: all ranks.
        reshard_after_forward: free parameters between forward and backward; ``None`` means yes
            except for the root.
        shard_placement_fn: how to shard each parameter: ``Shard(dim)``, even or not; ``None`` for
            dim 0; ``Replicate()`` to keep it whole; a :class:`polyshard.ShardPlacement` names the
            mesh too. Parameters of one mesh and dtype communicate together.
        mp_policy: dtypes of compute, reduction and outputs. Its ``param_dtype_override_fn`` (torch
            2.15) is called once for each parameter, here; parameters of one compute dtype
            communicate together.
        offload_policy: the default, or ``CPUOffloadPolicy()``, which selects the plugin
            installed as ``offload`` (polyshard-offload).
        ignored_params: parameters that stay unsharded.
        dp_mesh_dims: the data-parallel axes of ``mesh``, if it has others too.
        plugins: plugin objects, or names from the ``polyshard.plugins`` entry points. Order does
            not matter, and an installed plugin is inactive until it is passed. Only for parameters
            that are ``DTensor`` s already, and that none of these takes, the engine adds the plugin
            installed as ``tensor_parallel`` (polyshard-tensor-parallel).

    Returns:
        The ``module`` argument; each module is now a :class:`polyshard.FSDPModule`.

    Raises:
        ModuleError, MeshError, SettingError, UnsupportedError, PluginError: all ``ValueError`` s
            with the fix. Raised before any communication, except to make process groups that
            ``reshard_after_forward=<int>`` needs.
    """
    warn_if_untested()
    modules = _modules_of(module)
    _check_supported(reshard_after_forward, dp_mesh_dims)
    plugins = with_policy(plugins, offload_policy)
    roles = resolve_mesh(mesh, dp_mesh_dims)
    with reporting(partial(audiences, roles.mesh)):
        stack = build_stack(plugins)
        for member in modules:
            stack.prepare(member, roles.mesh)
        unit = Unit(modules, roles, mp_policy)
        unit.reshard_after_forward = _reshards(reshard_after_forward, roles)
        ignored = ignored_params or set()
        collector = Collector(roles, ignored, shard_placement_fn, stack, mp_policy)
        move_to_device(modules, collector, roles)
        sources = collector.sources(modules)
        _plan_groups(unit, sources, collector.stack)
        made = tuple(unit.groups)
        _shard(unit, sources, collector)
        unit.initial_values = initial_values(made, sources)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have ``module.method_name(...)`` gather and free parameters as ``forward`` does.

    A no-op on whatever is not sharded, so that model code may call it unconditionally.

    Raises:
        SettingError: when the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method: Callable[..., Any] | None = getattr(module, method_name, None)
    if method is None:
        raise SettingError(f"{type(module).__name__} has no method '{method_name}'.")
    setattr(module, method_name, UnitHooks(own_unit(module)).around(module, method))


def _modules_of(given: object) -> tuple[nn.Module, ...]:
    """The modules of one unit, once it is seen that they can be one."""
    modules = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    _check_unsharded(modules)
    check_modules(modules)
    return cast("tuple[nn.Module, ...]", modules)


def _check_unsharded(modules: Sequence[object]) -> None:
    for module in modules:
        if isinstance(module, nn.Module) and unit_of(module) is not None:
            raise AlreadyShardedError(
                f"fully_shard was applied to this {type(module).__name__} already; it can be "
                "applied to a module once. Shard submodules first and each module one time."
            )


def _check_supported(reshard_after_forward: object, dp_mesh_dims: object) -> None:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        raise SettingError(
            "reshard_after_forward must be None, a bool or an int, got "
            f"{type(reshard_after_forward).__name__} {reshard_after_forward!r}."
        )
    if not (dp_mesh_dims is None or isinstance(dp_mesh_dims, DataParallelMeshDims)):
        raise SettingError(
            f"dp_mesh_dims takes a DataParallelMeshDims, got {type(dp_mesh_dims).__name__}."
        )


def _reshards(reshard_after_forward: bool | int | None, roles: MeshRoles) -> bool | int | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    size = roles.shard_size
    if reshard_after_forward < 1 or size % reshard_after_forward:
        raise SettingError(
            f"reshard_after_forward={reshard_after_forward} must divide the shard axis' {size} "
            "ranks."
        )
    if reshard_after_forward == size:
        return True
    if reshard_after_forward == 1:
        logger.warning("reshard_after_forward=1 keeps parameters unsharded; pass False to say so")
        return False
    return reshard_after_forward


def _plan_groups(unit: Unit, sources: Sequence[Source], stack: PluginStack) -> None:
    kinds = split_by_kind(sources)
    for name, members in zip(group_names(unit.name, len(kinds)), kinds, strict=True):
        roles = members[0].placed.roles
        group = ParameterGroup(members, stack, name, _block_size(unit, roles))
        group.pool = unit.context.pool
        unit.groups.append(group)


def _block_size(unit: Unit, roles: MeshRoles) -> int | None:
    """Ranks of a block for a group with ``roles``, which need not be the unit's own."""
    wanted = unit.reshard_after_forward
    if wanted is None or isinstance(wanted, bool) or roles.shard_size <= wanted:
        return None
    if roles.shard_size % wanted:
        raise SettingError(
            f"reshard_after_forward={wanted} does not divide the {roles.shard_size} ranks of "
            f"{roles.describe()}, which shard_placement_fn chose for some parameters."
        )
    return wanted


def _shard(unit: Unit, sources: Sequence[Source], collector: Collector) -> None:
    for group in unit.groups:
        group.set_block(group.block_size)
    for group in unit.groups:
        mark(group, group.shard(), collector.terms)
    for source in sources:
        for owner in source.owners:
            tag_managed_module(owner.module)
    for group in adopt_shared(unit, collector.shared):
        group.set_block(_block_size(unit, group.roles))
    StateDictHooks(unit)
    hooks = UnitHooks(unit)
    hooks.attach()
    # Late, because a root hands its context to units below.
    end = lambda: unit.context.end_backward()  # noqa: E731, PLW0108
    state = EngineState(hooks.parts(), end, lambda: unit.context.finalization.line)
    for module in unit.modules:
        mix_in(module, unit)
        register_sharded(module)
        show_to_torch(module, state)
