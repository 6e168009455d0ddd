"""What happens once, at the first forward of the outermost unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from torch import nn

from polyshard.agreement.meeting import reporting
from polyshard.engine.optimizers import prepare_steps, refuse_replaced
from polyshard.engine.plans import audiences, compare_plans
from polyshard.engine.ties import check_contained
from polyshard.engine.unit import Unit, UnitWatch
from polyshard.errors import LifecycleError, SettingError
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import Registration

ROOT = "(root)"
"""What a root is called, and its group; units below have the names that lead to them."""


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of ``module``, if any."""
    return module.__dict__.get("_polyshard_unit")


def units_below(root: nn.Module) -> Iterator[tuple[str, nn.Module, Unit]]:
    """Every unit in ``root``'s tree with the first name that leads to it, outermost first."""
    seen: set[int] = set()
    for name, module in root.named_modules():
        unit = unit_of(module)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield name, module, unit


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Every group in the tree of ``model``, outermost units first.

    Raises:
        SettingError: when nothing of it is sharded.
    """
    return list(groups_by_label(model).values())


def groups_by_label(model: nn.Module) -> dict[str, ParameterGroup]:
    """The same by what they are called in ``model``, also where that contains several roots.

    Raises:
        SettingError: when nothing of it is sharded.
    """
    groups = {
        label: group
        for name, _, unit in units_below(model)
        for label, group in zip(
            group_names(_uncompiled(name) or ROOT, len(unit.groups)), unit.groups, strict=True
        )
    }
    if not groups:
        raise SettingError(
            f"{type(model).__name__} has no parameters sharded by polyshard; call "
            "fully_shard first."
        )
    return groups


def initialize_root(root: Unit) -> None:
    """Share one context among all units below ``root``, name them, compare plans across ranks.

    When that fails, everything is as before: the next forward tries again.

    Raises:
        LifecycleError: when a unit below already ran as a root of its own.
        PlanMismatchError: on every rank, when ranks planned different things.
    """
    found = list(units_below(root.modules[0]))
    before = [(unit, unit.is_root, unit.context) for _, _, unit in found]
    try:
        with reporting(partial(audiences, root.roles.mesh)):
            _check_fresh(root, found)
            check_contained(root, (unit for _, _, unit in found))
            substitutes = _substitutes(found)
            _gather_below(root, found, keep_memory=substitutes.keys())
            compare_plans(root.roles, root.context.units)
            _put_back(substitutes)
        groups = list(root.context.groups())
        refuse_replaced(groups, root.modules[0])
        prepare_steps(root.context.turn, groups, root.context.reductions)
    except BaseException:
        root.context.units.clear()
        for unit, is_root, context in before:
            unit.is_root, unit.context = is_root, context
        raise


def _check_fresh(root: Unit, found: Sequence[tuple[str, nn.Module, Unit]]) -> None:
    if len(root.modules) > 1:
        raise LifecycleError(
            "the first forward called a unit made from a list of modules "
            f"({', '.join(type(m).__name__ for m in root.modules)}), which cannot be a root. "
            "Apply fully_shard to the module that contains them too, and call that module."
        )
    for name, _, unit in found:
        if unit is not root and unit.is_root is not None:
            raise LifecycleError(
                f"'{name}' already ran forward on its own and became a root. Call the outermost "
                "sharded module first, or shard only the part you call."
            )
        if unit is not root and unit.context.finalization.is_manual:
            raise LifecycleError(
                f"set_manual_backward_finalization() was called on '{name}', which is not the "
                "root. Call it on the outermost sharded module."
            )


def _gather_below(
    root: Unit, found: Sequence[tuple[str, nn.Module, Unit]], keep_memory: Collection[Unit]
) -> None:
    context = root.context
    for _, _, unit in found:
        unit.reshard()  # so that modules hold sharded parameters, which names are looked up by
    fqns = {id(p): n for n, p in root.modules[0].named_parameters()}
    for name, _, unit in found:
        unit.is_root = unit is root
        own, unit.context = unit.context.reductions.most, context
        context.reductions.most = max(context.reductions.most, own)  # as torch takes it
        context.units.append(unit)
        unit.name = name or ROOT
        _name_groups(unit, fqns)
        unit.watch = UnitWatch.of(unit.groups)
        for group in unit.groups:
            group.turn, group.lanes = context.turn, context.lanes
            group.pool = group.pool if unit in keep_memory else context.pool
            group.transport.use_turns(context.turn)
    observers = {id(o): o for group in context.groups() for o in group.meter.observers}
    context.observers = tuple(observers.values())
    if not root.groups:  # it computes nevertheless
        root.watch = UnitWatch.of(context.groups())


def _substitutes(
    found: Sequence[tuple[str, nn.Module, Unit]],
) -> dict[Unit, list[Registration]]:
    """What replaces parameters gathered early (``torch.func.functional_call``), and where.

    A transform computes with tensors over the memory of those parameters, under their names.
    """
    standing: dict[Unit, list[Registration]] = {}
    for unit in {unit: None for _, _, unit in found if not unit.is_sharded()}:
        for group in unit.groups:
            leaves = group.prepare().leaves
            for sharded, leaf in zip(group.shards.parameters, leaves, strict=True):
                for owner in sharded.owners:
                    held = owner.held
                    if held is not None and held is not leaf and held is not sharded.parameter:
                        standing.setdefault(unit, []).append(Registration(owner, held))
    return standing


def _put_back(substitutes: Mapping[Unit, Sequence[Registration]]) -> None:
    for unit, registrations in substitutes.items():
        unit.unshard()
        unit.wait()
        for registration in registrations:
            registration.owner.module._parameters[registration.owner.name] = registration.value


def _uncompiled(name: str) -> str:
    """As it is without ``torch.compile``, which wraps modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def preview_names(root: nn.Module) -> None:
    """Give groups that have none yet the names that a first forward of ``root`` would give them.

    Plugins choose parameters by them, and what they keep is saved under them.
    """
    fqns = {id(p): name for name, p in root.named_parameters()}
    for name, _, unit in units_below(root):
        if unit.is_root is None:
            labels = group_names(name or ROOT, len(unit.groups))
            for group, label in zip(unit.groups, labels, strict=True):
                if group.is_sharded:
                    group.rename(label, fqns)


def group_names(unit_name: str, count: int) -> list[str]:
    """What the groups of a unit are called: after it, and numbered where there are several."""
    if count == 1:
        return [unit_name]
    return [f"{unit_name}#{index}" for index in range(count)]


def _name_groups(unit: Unit, fqns: Mapping[int, str]) -> None:
    for group, name in zip(unit.groups, group_names(unit.name, len(unit.groups)), strict=True):
        group.rename(name, fqns)
