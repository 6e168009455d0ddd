"""Which parameters a unit takes, and how each is to be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from polyshard._torch.engine_state import is_replicated
from polyshard._torch.newer import told_by_spmd_types
from polyshard._torch.private import has_fsdp_protocol, local_tensor
from polyshard.engine.root import unit_of
from polyshard.engine.ties import Shared, Terms, check_module, shared
from polyshard.errors import ModuleError, PluginError, SettingError, UnsupportedError
from polyshard.params.parameter import Form, Owner, Source
from polyshard.plugins.discovery import stand_in
from polyshard.plugins.hookspecs import chunk_dtensor
from polyshard.plugins.seams import ParamInfo
from polyshard.plugins.stack import PluginStack
from polyshard.plugins.transforms import Extensions, is_transformed
from polyshard.policies import MixedPrecisionPolicy, policy_for
from polyshard.program.tensor_protocol import check_protocol
from polyshard.sharding.layout import chunk_bounds
from polyshard.sharding.mesh import MeshRoles
from polyshard.sharding.placement import Placed, PlacementFunction, resolve_placement, shard_shape
from polyshard.sharding.rows import is_local_part, placements_of_rows


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Refuse what cannot be a unit.

    Raises:
        SettingError: for things that are not modules, or an empty list.
        ModuleError: for containers without a forward, and modules without any parameter.
        AlreadyShardedError: raised by the caller for a second application.
    """
    if not modules:
        raise SettingError("fully_shard was given an empty list of modules.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise SettingError(f"fully_shard takes modules, got {type(module).__name__}.")
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if container and type(module).forward is nn.Module.forward:
            raise ModuleError(
                f"fully_shard does not support containers without a forward, got "
                f"{type(module).__name__}. Shard its members one by one, or pass them as a list."
            )
    if not any(True for m in modules for _ in m.parameters()):
        names = ", ".join(type(m).__name__ for m in modules)
        raise ModuleError(
            f"fully_shard({names}): there are no parameters to shard in this module or below it."
        )


def managed_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose own parameters belong to a unit over ``roots``, with names inside the unit.

    Those of other units, and what torch's ``replicate`` was applied to, are left alone.
    """
    seen: set[nn.Module] = set()
    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        yield from _walk(root, prefix, seen, is_root=True)


def _walk(
    module: nn.Module, prefix: str, seen: set[nn.Module], *, is_root: bool
) -> Iterator[tuple[str, nn.Module]]:
    if is_replicated(module) or (not is_root and unit_of(module) is not None):
        return
    # A module reached by a second name is walked again: it owns its parameters under both.
    repeated = module in seen
    seen.add(module)
    yield prefix, module
    if repeated:
        return
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", seen, is_root=False)


@dataclass(frozen=True)
class _Peeled:
    """A parameter as found, and what plugins flattened it into."""

    info: ParamInfo
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    value: Tensor
    extensions: Extensions


class Collector:
    """Gathers the parameters of one unit into sources, tied ones into one."""

    def __init__(
        self,
        roles: MeshRoles,
        ignored: set[nn.Parameter],
        placement: PlacementFunction | None,
        stack: PluginStack,
        policy: MixedPrecisionPolicy,
    ) -> None:
        """``placement`` is the user's ``shard_placement_fn``; ``policy`` is the unit's."""
        self._policy = policy
        self._roles = roles
        self._ignored = {id(p) for p in ignored}
        self._placement = placement
        self.stack = stack
        """The plugins of the unit, with the one that was found for ``DTensor`` s if any was."""
        self._given = stack.lines()
        self.shared: list[Shared] = []
        """What :meth:`sources` left to units that took it before."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether the unit takes ``parameter`` if one of its modules registers it."""
        return id(parameter) not in self._ignored

    def sources(self, roots: Sequence[nn.Module]) -> list[Source]:
        """Every parameter the unit takes, in the order modules list them.

        Raises:
            ModuleError: for a module of an earlier unit.
        """
        owners: dict[int, list[Owner]] = {}
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, module in managed_modules(roots):
            for name, parameter in module._parameters.items():
                if parameter is None or not self.takes(parameter):
                    continue
                check_module(f"{prefix}{name}", module, parameter)
                owner = Owner(module, name)
                if owner not in owners.setdefault(id(parameter), []):
                    owners[id(parameter)].append(owner)
                found.setdefault(id(parameter), (f"{prefix}{name}", parameter))
        for key, (fqn, parameter) in list(found.items()):
            at = shared(fqn, parameter, tuple(owners[key]), self.terms(parameter))
            if at is not None:
                self.shared.append(at)
                del found[key]
        peeled = [self._peel(*found[key], tuple(owners[key])) for key in found]
        if any(isinstance(one.value, DTensor) for one in peeled) and self._find_tensor_parallel():
            peeled = [self._peel(*found[key], tuple(owners[key])) for key in found]
        return [self._source(one) for one in peeled]

    def terms(self, parameter: nn.Parameter) -> Terms:
        """What another call that shares ``parameter`` must say too."""
        param = self._policy.param_dtype or parameter.dtype
        reduce = self._policy.reduce_dtype or param
        return Terms(self._roles.describe(), self._roles.key, param, reduce, self._given)

    def _find_tensor_parallel(self) -> bool:
        """Have the installed plugin take what is a ``DTensor`` still; whether there is one."""
        purpose = "take parameters that are DTensors already"
        plugin = stand_in("tensor_parallel", "for_dtensors", purpose)
        if plugin is not None:
            self.stack = self.stack.joined(plugin)
        return plugin is not None

    def _peel(self, fqn: str, parameter: nn.Parameter, owners: tuple[Owner, ...]) -> _Peeled:
        if told := told_by_spmd_types(parameter):
            raise UnsupportedError(
                f"'{fqn}' is annotated by spmd_types ({told}): ranks hold different parts of it, "
                "and polyshard knows parts of DTensors only. Convert it to a DTensor, as "
                "parallelize_module does, or annotate it as the same on all axes."
            )
        info = ParamInfo(
            fqn=fqn,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            requires_grad=parameter.requires_grad,
            mesh=self._roles.mesh,
            module_class=type(owners[0].module),
            placements=_placements_of(parameter),
            reduce_dtype=self._policy.reduce_dtype,
        )
        with torch.no_grad():
            value, extensions = self.stack.transforms.flatten(parameter.detach(), info)
            if is_transformed(extensions):
                self.stack.transforms.verify(value, extensions, info, parameter.detach())
        return _Peeled(info, parameter, owners, value, extensions)

    def _source(self, one: _Peeled) -> Source:
        fqn, value = one.info.fqn, one.value
        _check_shardable(fqn, value)
        wanted = self._placement(one.parameter) if self._placement is not None else None
        placed = resolve_placement(wanted, fqn, value, self._roles)
        if has_fsdp_protocol(value):
            check_protocol(fqn, value, placed.dim)
        try:
            return self._placed_source(one, placed)
        except UnsupportedError:
            others = () if wanted is not None or has_fsdp_protocol(value) else _others(value)
            for other in others:
                with suppress(UnsupportedError):
                    placed = resolve_placement(other, fqn, value, self._roles)
                    return self._placed_source(one, placed)
            raise

    def _placed_source(self, one: _Peeled, placed: Placed) -> Source:
        info = replace(one.info, mesh=placed.roles.mesh, shard_dim=placed.dim)
        if not is_transformed(one.extensions) or is_local_part(one.value, one.parameter.detach()):
            info = replace(info, part_shape=tuple(one.value.shape))
        info = replace(info, facts=self.stack.facts(one.value, info))
        policy = policy_for(self._policy, info.fqn, one.parameter)
        source = Source(
            info, one.parameter, one.owners, placed, one.value, one.extensions, policy=policy
        )
        if is_transformed(one.extensions):
            source = replace(source, form=self._form(source))
        return source

    def _form(self, source: Source) -> Form | None:
        """What a plugin makes of the sharded form of a parameter that was flattened.

        For a ``DTensor`` some plugin must say; for others the engine's own form will do.
        """
        placed, fqn = source.placed, source.info.fqn
        given = source.parameter.detach()
        rank, mesh = placed.roles.shard_rank, placed.roles.mesh
        answer = self.stack.claimed(chunk_dtensor, given, rank, mesh, source.info)
        if not isinstance(answer, DTensor):
            if not isinstance(given, DTensor):
                return None
            raise PluginError(
                f"'{fqn}' is a DTensor that a plugin flattened, and chunk_dtensor returned a "
                f"{type(answer).__name__} for it. Return the sharded parameter as a DTensor, so "
                "that its other axes are not lost."
            )
        expected = shard_shape(source.value.shape, placed, rank)
        local = tuple(local_tensor(answer).shape)
        if local != expected:
            raise PluginError(
                f"chunk_dtensor gave '{fqn}' a local shape of {local}, but rank {rank} of the "
                f"shard axis holds {expected} of the tensor that pre_flatten_transform returned."
            )
        return Form(answer.device_mesh, _placements_for(source, answer), answer.shape)


def _others(value: Tensor) -> tuple[Shard | Replicate, ...]:
    """Where else a parameter may go whose dim 0 has rows that no placements describe.

    Tensor parallelism cuts 50257 rows into 25129 and 25128: over three more ranks ``DTensor`` reads
    other rows than those that are there, and would save them as such.
    """
    return (*(Shard(dim) for dim in range(1, value.ndim)), Replicate())


def _placements_for(source: Source, answer: DTensor) -> tuple[Placement, ...]:
    """Placements of ``answer``, if they describe the rows this rank holds. See [Note: rows]."""
    given, value, placed = source.parameter.detach(), source.value, source.placed
    if is_local_part(value, given):
        placements = placements_of_rows(answer, given, placed)
        if placements is not None:
            return placements
    elif _holds_rows(value, placed, local_tensor(answer)):
        return tuple(answer.placements)
    raise PluginError(
        f"chunk_dtensor answered {tuple(answer.placements)} on {answer.device_mesh} for "
        f"'{source.info.fqn}' {source.info.shape}, which describes other rows (dim {placed.dim}) "
        "than this rank holds of the tensor that pre_flatten_transform returned. Return placements "
        "of these rows: strided ones for a dim that tensor parallelism divides, as "
        "TensorParallel() of polyshard-tensor-parallel does."
    )


def _holds_rows(value: Tensor, placed: Placed, local: Tensor) -> bool:
    """Whether ``local`` has the values of this rank's rows of ``value``, where there are any."""
    if placed.dim is not None:
        start, stop = chunk_bounds(
            value.shape[placed.dim], placed.roles.shard_size, placed.roles.shard_rank
        )
        value = value.narrow(placed.dim, start, stop - start)
    return value.is_meta or local.is_meta or torch.equal(value, local)


def _placements_of(parameter: Tensor) -> tuple[Placement, ...] | None:
    return tuple(parameter.placements) if isinstance(parameter, DTensor) else None


def _check_shardable(fqn: str, value: Tensor) -> None:
    if isinstance(value, DTensor):
        raise UnsupportedError(
            f"'{fqn}' is a DTensor already ({value.placements} on {value.device_mesh}). Sharding "
            "it once more over the data-parallel mesh needs a plugin for tensor parallelism "
            "(polyshard-tensor-parallel)."
        )


def move_to_device(roots: Sequence[nn.Module], collector: Collector, roles: MeshRoles) -> None:
    """Move parameters and buffers of a unit to the mesh's device; meta tensors stay meta."""
    device = roles.device
    for _, module in managed_modules(roots):
        parameters = [p for p in module.parameters(recurse=False) if collector.takes(p)]
        for tensor in (*parameters, *module.buffers(recurse=False)):
            if tensor.device != device and tensor.device.type != "meta":
                move(tensor, tensor.detach().to(device))


def move(tensor: Tensor, moved: Tensor) -> None:
    """Have ``tensor``, which others hold too, be ``moved``."""
    is_plain = type(tensor) is Tensor or nn.Parameter in type(tensor).__mro__
    if is_plain:  # else what is within would stay where it is
        with suppress(RuntimeError):  # devices not built into torch have tensors of another kind
            tensor.data = moved
            return
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    for name, value in tensor.__dict__.items():
        made.__dict__.setdefault(name, value)
    torch.utils.swap_tensors(tensor, made)


def _kind(source: Source) -> tuple[object, ...]:
    value = source.value
    compute = source.policy.param_dtype if value.dtype.is_floating_point else None
    dtypes = value.dtype, compute or value.dtype
    return *dtypes, value.device, has_fsdp_protocol(value), source.placed.roles.key


def split_by_kind(sources: Sequence[Source]) -> list[list[Source]]:
    """One list per dtypes (at rest and in compute), device, mesh, and protocol of tensors."""
    kinds: dict[tuple[object, ...], list[Source]] = {}
    for source in sources:
        kinds.setdefault(_kind(source), []).append(source)
    return list(kinds.values())
