"""Every hook a plugin may implement, in the order a parameter meets them.

The engine calls hooks while it builds plans, and none in a training step. (The functions of the
two transforms are part of the plan; the engine also calls them on gradients.) An implementation may
take any subset of a hook's arguments, by name. Returning ``None`` always declines.

Each docstring states *When* the engine calls the hook, what the hook *Returns*, how the results of
several plugins *Combine*, and what *Ranks* must agree on. Five hooks about a group are exclusive:
two answers are an error, ``Around(make)`` instead of an answer wraps the one in use, and wrappers
nest. Ranks must return the same kind with the same settings.

Six hooks have the names, arguments and meaning of ``torch.distributed.fsdp``'s
``FSDPExtensions``, plus ``param``, which describes the tensor.
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
    Ranks: must make the same changes. The engine calls the hook again on nested modules when it
        shards the module that contains them, so a second call must change nothing.
    """


@hookspec
def pre_flatten_transform(
    tensor: Tensor, param: ParamInfo | None
) -> tuple[Tensor, Any | None] | None:
    """Return the tensor to shard instead of ``tensor``, and an object for the inverse transform.

    When: once for each parameter, before it is sharded, and for each of its gradients before it is
        reduced.
    Return: the tensor to shard and an extension object; ``None``, or ``tensor`` and ``None``, to
        decline.
    Combine: nested: each plugin gets the tensor that the previous one in plugin order returned.
    Ranks: must return tensors of the same shape and dtype.
    """


@hookspec
def polyshard_parameter_facts(tensor: Tensor, param: ParamInfo) -> str | None:
    """Return a fact of a parameter that all ranks must agree on, such as a digest of its values.

    When: once for each parameter, with the tensor that the engine is about to shard.
    Return: a short text without line breaks, which becomes part of the parameter's line in the
        plan.
    Combine: all, in plugin order.
    Ranks: compare the texts before the first transfer; an error names a parameter that differs.
    """


@hookspec
def polyshard_sharding_constraint(group: GroupInfo) -> ShardingConstraint | None:
    """Declare which elements of a parameter must stay on one rank.

    When: once for each group, before its layout is planned.
    Return: a constraint.
    Combine: all apply; a layout that breaks one is an error that names the plugin.
    Ranks: must return the same constraint.
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
    """Return the part of ``tensor`` for rank ``rank`` as a ``ShardedTensor``.

    When: a state dict of ``ShardedTensor`` values is made.
    Return: the sharded tensor.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: every rank calls it and gets its own part of the same tensor.
    """


@hookspec
def chunk_dtensor(
    tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo | None
) -> DTensor | None:
    """Return ``tensor`` as a ``DTensor`` sharded over ``device_mesh``.

    When: the engine shards a parameter that :func:`pre_flatten_transform` changed, or makes a state
        dict of ``DTensor`` values. For sharding, ``tensor`` is the original parameter; if that is a
        ``DTensor``, some plugin must answer.
    Return: the ``DTensor``. Its placements must describe the rows of the flattened tensor that this
        rank holds; the engine refuses others. It makes plain placements strided where they divide a
        dim that a later axis divides too. The mesh may have more axes than ``device_mesh``; the
        sharded parameter has them too.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: must return the same placements.
    """


@hookspec
def polyshard_shard_storage(group: GroupInfo) -> StorageFactory | Around[StorageFactory] | None:
    """Decide where the shard of ``group`` rests between uses.

    When: once for each group, before it is sharded.
    Return: a storage factory.
    """


@hookspec
def polyshard_collectives_backend(
    group: GroupInfo,
) -> CollectivesBackend | Around[CollectivesBackend] | None:
    """Decide how the bytes of ``group`` move.

    When: once for each group, before its layout is planned.
    Return: a backend.
    """


@hookspec
def polyshard_gather_codec(group: GroupInfo) -> GatherCodec | Around[GatherCodec] | None:
    """Decide what the all-gather of ``group`` sends.

    When: once for each group, while its plan is built.
    Return: a codec.
    Ranks: payloads are equal in size.
    """


@hookspec
def post_unflatten_transform(
    tensor: Tensor, param_extension: Any, param: ParamInfo | None
) -> Tensor | None:
    """Invert :func:`pre_flatten_transform` on the unsharded tensor, without a copy.

    When: once for each parameter before it is sharded, as a check; then each time the engine makes
        the unsharded parameter.
    Return: the tensor that modules compute with. It must alias ``tensor``; the engine refuses a
        copy.
    Combine: in reverse order; each plugin gets back the extension that it returned.
    Ranks: must return tensors of the same shape and dtype.
    """


@hookspec
def polyshard_reduce_codec(group: GroupInfo) -> ReduceCodec | Around[ReduceCodec] | None:
    """Decide how the gradients of ``group`` are sent and summed.

    When: once for each group, while its plan is built.
    Return: a codec.
    Ranks: payloads are equal in size.
    """


@hookspec
def polyshard_gradient_landing(
    group: GroupInfo,
) -> GradientLanding | Around[GradientLanding] | None:
    """Decide which gradients of ``group`` are reduced whole to one rank instead of scattered.

    When: once for each group, before its layout is planned.
    Return: a landing.
    Ranks: choose the same owners, which are part of the plan.
    """


@hookspec
def polyshard_observer(group: GroupInfo) -> Observer | None:
    """Observe the transfers and the life cycle of ``group``.

    When: once for each group, while its plan is built.
    Return: an observer; one object may observe many groups.
    Combine: all, in plugin order.
    Ranks: may differ; an observer must not communicate.
    """


@hookspec
def polyshard_state_dict_adapter(group: GroupInfo) -> StateDictAdapter | None:
    """Convert parameters that the plugin changed to and from their native form in checkpoints.

    When: once for each group, while its plan is built.
    Return: an adapter.
    Combine: all; on save in plugin order, on load in reverse.
    Ranks: must return the same adapter.
    """


@hookspec
def polyshard_plugin_state(group: GroupInfo) -> Stateful | None:
    """Return the state of the plugin that checkpoints must hold to resume training exactly.

    When: once for each group, after all other hooks about it.
    Return: an object with ``state_dict()`` and ``load_state_dict(state)``, which
        ``polyshard.plugin_state_dict(model)`` and ``load_plugin_state_dict`` call.
    Combine: all, each under the name of its plugin.
    Ranks: may differ; every rank saves and loads its own state.
    """


@hookspec
def all_gather_dtensor(
    tensor: DTensor, parent_mesh: DeviceMesh | None, param: ParamInfo | None
) -> Tensor | None:
    """Return the local tensor of ``tensor`` with every data-parallel axis gathered.

    When: a full state dict is made, or a ``DTensor`` state dict is loaded.
    Return: the gathered tensor.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: every rank calls it; it may communicate.
    """


@hookspec
def pre_load_state_dict_transform(
    tensor: Tensor, param: ParamInfo | None
) -> tuple[Tensor, list[Any]] | None:
    """Return the tensor and the local shards to load from a sharded value of a state dict.

    When: a sharded state dict is loaded.
    Return: the tensor and its local shards.
    Combine: exclusive for each parameter; two answers are an error.
    Ranks: must return shards of the same global tensor.
    """


@hookspec
def polyshard_teardown(group: GroupInfo) -> None:
    """Release files, memory and threads that the plugin made for ``group``.

    When: once for each group: in ``polyshard.close(model)``, after sharding it failed, or after the
        model was garbage-collected. Not when the process ends. ``group.identity`` is the same
        object as in all infos of the group.
    Return: nothing.
    Combine: every plugin, in reverse order, even if one of them raises.
    Ranks: may call it at different times; it must not communicate.
    """
