"""Every hook a plugin may implement, in the order a parameter meets them.

All hooks are asked while plans are built; a training step asks none. (The functions of the two
transforms are frozen into the plan, and run on gradients as plain objects do.) An implementation
may take any subset of a hook's arguments, by name. ``None`` always means "not mine".

Each text says *When* a hook is called, what to *Return*, how answers of several plugins *Combine*,
and what *Ranks* must agree on.

The first six carry the names, arguments and meaning of ``torch.distributed.fsdp``'s
``FSDPExtensions``, plus ``param``, which says what the tensor is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyshard.plugins.contract import hookspec

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from polyshard.plugins.seams import (
        Around,
        CollectivesBackend,
        GatherCodec,
        GradientLanding,
        GroupInfo,
        Observer,
        ParamInfo,
        ReduceCodec,
        ShardingConstraint,
        StateDictAdapter,
        Stateful,
        StorageFactory,
    )


@hookspec
def polyshard_prepare_model(module: nn.Module, mesh: DeviceMesh) -> None:
    """Change ``module`` before its parameters are collected, as applying a parallel plan does.

    When: once for each module of a ``fully_shard`` call, before anything is sharded.
    Return: nothing.
    Combine: every plugin, in plugin order.
    Ranks: must change the module alike. The same plugin meets many calls, and nested modules again
        with the module that contains them: preparing twice must be harmless.
    """


@hookspec
def pre_flatten_transform(
    tensor: Tensor, param: ParamInfo | None
) -> tuple[Tensor, Any | None] | None:
    """Give the tensor to shard in place of ``tensor``, and what undoing it will need.

    When: once for each parameter, before it is sharded, and for each of its gradients before it is
        reduced.
    Return: the tensor to shard and an extension object; ``None``, or ``tensor`` and ``None``, to
        stay out.
    Combine: nested: each plugin gets the tensor the one before it in plugin order returned.
    Ranks: must return tensors of the same shape and dtype.
    """


@hookspec
def polyshard_parameter_facts(tensor: Tensor, param: ParamInfo) -> str | None:
    """Say something of a parameter that all ranks must agree on, such as a digest of its values.

    When: once for each parameter, with what is about to be sharded of it.
    Return: a short text without line breaks, which becomes part of the parameter's line in the
        plan.
    Combine: all, in plugin order.
    Ranks: are compared before the first transfer; a difference is an error naming the parameter.
    """


@hookspec
def polyshard_sharding_constraint(group: GroupInfo) -> ShardingConstraint | None:
    """Say which elements of a parameter must stay on one rank.

    When: once for each group, before its layout is planned.
    Return: a constraint.
    Combine: all hold; one that the layout breaks is an error naming the plugin.
    Ranks: must return the same.
    """


@hookspec
def chunk_tensor(
    tensor: Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    device: torch.device | None,
    param: ParamInfo | None,
) -> Tensor | None:
    """Give rank ``rank``'s part of ``tensor`` as a ``ShardedTensor``.

    When: a state dict of ``ShardedTensor`` values is made.
    Return: the sharded tensor.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: every rank calls it and gets its own part of the same tensor.
    """


@hookspec
def chunk_dtensor(
    tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo | None
) -> DTensor | None:
    """Give ``tensor`` as a ``DTensor`` sharded over ``device_mesh``.

    When: a parameter that :func:`pre_flatten_transform` took is sharded (``tensor`` is the
        parameter as it was; a ``DTensor`` must be answered for); and when a state dict of
        ``DTensor`` values is made.
    Return: the ``DTensor``, whose placements must describe the rows that this rank holds of the
        flattened tensor; others are refused, except that plain ones are made strided where they
        cut a dim that a later axis had cut. Its mesh may have more axes than ``device_mesh``: the
        sharded parameter will be such a ``DTensor``.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: must return the same placements.
    """


@hookspec
def polyshard_shard_storage(group: GroupInfo) -> StorageFactory | Around[StorageFactory] | None:
    """Decide where the shard of ``group`` rests between uses.

    When: once for each group, before it is sharded.
    Return: a storage factory; ``Around(make)`` to go around the one that has the role.
    Combine: exclusive; wrappers nest (see Around).
    Ranks: must return the same kind with the same settings.
    """


@hookspec
def polyshard_collectives_backend(
    group: GroupInfo,
) -> CollectivesBackend | Around[CollectivesBackend] | None:
    """Decide how the bytes of ``group`` move.

    When: once for each group, before its layout is planned.
    Return: a backend; ``Around(make)`` to go around the one that has the role.
    Combine: exclusive; wrappers nest (see Around).
    Ranks: must return the same kind with the same settings.
    """


@hookspec
def polyshard_gather_codec(group: GroupInfo) -> GatherCodec | Around[GatherCodec] | None:
    """Decide what travels in the all-gather of ``group``.

    When: once for each group, while its plan is built.
    Return: a codec; ``Around(make)`` to go around the one that has the role.
    Combine: exclusive; wrappers nest (see Around).
    Ranks: must return the same kind with the same settings; payloads are equal in size.
    """


@hookspec
def post_unflatten_transform(
    tensor: Tensor, param_extension: Any, param: ParamInfo | None
) -> Tensor | None:
    """Undo :func:`pre_flatten_transform` on the unsharded tensor, without a copy.

    When: once for each parameter before it is sharded, to see that it is undone; and whenever its
        unsharded form is made.
    Return: the tensor that modules compute with; it must alias ``tensor``. A copy is refused.
    Combine: in reverse; each plugin gets back the extension it returned.
    Ranks: must return tensors of the same shape and dtype.
    """


@hookspec
def polyshard_reduce_codec(group: GroupInfo) -> ReduceCodec | Around[ReduceCodec] | None:
    """Own how the gradients of ``group`` travel and are summed.

    When: once for each group, while its plan is built.
    Return: a codec; ``Around(make)`` to go around the one that has the role.
    Combine: exclusive; wrappers nest (see Around).
    Ranks: must return the same kind with the same settings; payloads are equal in size.
    """


@hookspec
def polyshard_gradient_landing(
    group: GroupInfo,
) -> GradientLanding | Around[GradientLanding] | None:
    """Decide which gradients of ``group`` land whole on one rank instead of on shards.

    When: once for each group, before its layout is planned.
    Return: a landing; ``Around(make)`` to go around the one that has the role.
    Combine: exclusive; wrappers nest (see Around).
    Ranks: must return the same kind with the same settings, and the same owners, which are part of
        the plan.
    """


@hookspec
def polyshard_observer(group: GroupInfo) -> Observer | None:
    """Watch the life of ``group``.

    When: once for each group, while its plan is built.
    Return: an observer; the same object may watch many groups.
    Combine: all, in plugin order.
    Ranks: may differ; an observer must not communicate.
    """


@hookspec
def polyshard_state_dict_adapter(group: GroupInfo) -> StateDictAdapter | None:
    """Keep checkpoints native where the plugin changes what a parameter looks like.

    When: once for each group, while its plan is built.
    Return: an adapter.
    Combine: all: on save in plugin order, on load in reverse.
    Ranks: must return the same.
    """


@hookspec
def polyshard_plugin_state(group: GroupInfo) -> Stateful | None:
    """Give what a checkpoint must hold of the plugin, so that training goes on as it would have.

    When: once for each group, after all other hooks about it.
    Return: an object with ``state_dict()`` and ``load_state_dict(state)``, called when
        ``polyshard.plugin_state_dict(model)`` and ``load_plugin_state_dict`` are.
    Combine: all, each under the name of its plugin.
    Ranks: may differ: every rank saves and loads its own.
    """


@hookspec
def all_gather_dtensor(
    tensor: DTensor, parent_mesh: DeviceMesh | None, param: ParamInfo | None
) -> Tensor | None:
    """Give the local tensor of ``tensor`` with every data-parallel axis gathered.

    When: a full state dict is made, or a ``DTensor`` state dict is loaded.
    Return: the gathered tensor.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: every rank calls it; it may communicate.
    """


@hookspec
def pre_load_state_dict_transform(
    tensor: Tensor, param: ParamInfo | None
) -> tuple[Tensor, list[Any]] | None:
    """Give the tensor and local shards to load from a sharded value of a state dict.

    When: a sharded state dict is loaded.
    Return: the tensor and its local shards.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: must return shards of the same global tensor.
    """


@hookspec
def polyshard_teardown(group: GroupInfo) -> None:
    """Let go of what the plugin made for ``group``: files, memory, threads.

    When: once for each group: in ``polyshard.close(model)``, when sharding it failed, or when
        nobody holds the model any more. Not when the process ends. ``group.identity`` is that of
        all infos of the group.
    Return: nothing.
    Combine: every plugin, in reverse; one that raises keeps none of the others.
    Ranks: may do it at different moments; it must not communicate.
    """
