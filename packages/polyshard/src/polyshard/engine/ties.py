"""Parameters that modules of several units use.

[Note: shared parameters]
The first ``fully_shard`` call that meets a parameter takes it, in a group of its unit. A later call
whose modules hold the original finds the mark that the first one left there: the sharded parameter,
the same object, takes the original's place, so that the tie and what an optimizer holds stay. The
group then moves up, whole, to the innermost unit that contains all modules which use it: only that
one computes whenever any of them does, so it gathers the group once, keeps it for all, and reduces
the sum of their gradients once. Calls go bottom-up, so the unit is known when it is made; a first
forward without one is refused.

Ties are seen by the identity of parameters, never by their memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from polyshard._torch.private import tag_managed_module
from polyshard.engine.unit import Unit
from polyshard.errors import ModuleError
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import Owner, Source, at_rest

MARK = "_polyshard_taken"
TermsOf = Callable[[nn.Parameter], "Terms"]


@dataclass(frozen=True)
class Terms:
    """What the calls that share a parameter must say alike."""

    mesh: str
    mesh_key: tuple[object, ...]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    plugins: tuple[str, ...]

    @override
    def __str__(self) -> str:
        plugins = ", ".join(self.plugins) or "no plugins"
        return f"{self.mesh}, {self.param_dtype} reduced in {self.reduce_dtype}, {plugins}"


@dataclass(frozen=True)
class Taken:
    """On an original parameter: the group that holds its sharded form, and on which terms.

    And on the modules that registered it.
    """

    group: weakref.ref[ParameterGroup]
    terms: Terms
    version: int

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copies and pickles of an original are ``None``."""
        return type(None), ()


@dataclass(frozen=True)
class Shared:
    """A parameter of an earlier unit's group, and modules that hold its original still."""

    group: ParameterGroup
    index: int
    owners: tuple[Owner, ...]


def mark(group: ParameterGroup, sources: Iterable[Source], terms: TermsOf) -> None:
    """Leave on the originals that ``group`` took them."""
    for source in sources:
        original = source.parameter
        taken = Taken(weakref.ref(group), terms(original), _version(original))
        setattr(original, MARK, taken)
        for owner in source.owners:
            owner.module.__dict__[MARK] = taken


def check_module(fqn: str, module: nn.Module, parameter: nn.Parameter) -> None:
    """Refuse a module that an earlier unit has, by one of its parameters.

    Raises:
        ModuleError: naming the module and that unit.
    """
    taken: Taken | None = module.__dict__.get(MARK)
    group = None if taken is None else taken.group()
    if group is None or all(at_rest(parameter) is not p.parameter for p in group.shards.parameters):
        return
    path, _, _ = fqn.rpartition(".")
    raise ModuleError(
        f"module '{path}' ({type(module).__name__}) is in two units: unit '{group.name}' took "
        f"'{fqn}' before. Call fully_shard on this module itself before the modules that share it, "
        "or pass those to one call as a list."
    )


def shared(
    fqn: str, parameter: nn.Parameter, owners: tuple[Owner, ...], terms: Terms
) -> Shared | None:
    """The place of ``parameter`` in an earlier unit; ``None`` when no unit took it.

    Raises:
        ModuleError: when that unit ran already, when the original changed since, or when that call
            said other things than this one.
    """
    taken: Taken | None = getattr(parameter, MARK, None)
    group = None if taken is None else taken.group()
    if taken is None or group is None:
        return None
    index = group.index_of(parameter)
    name = f"'{fqn}' shares its values with a parameter that unit '{group.name}' took already"
    if index is None:
        raise ModuleError(f"{name} and ran. Call fully_shard on all modules before any forward.")
    if _version(parameter) != taken.version:
        raise ModuleError(
            f"{name}, and was written to since: the two differ. Initialize and load before the "
            "first fully_shard call, or after the last."
        )
    if terms != taken.terms:
        raise ModuleError(
            f"{name} on other terms: {taken.terms} there, {terms} here. Give both calls the same "
            "mesh, mp_policy and plugins, or pass both modules to one call as a list."
        )
    return Shared(group, index, owners)


def adopt_shared(unit: Unit, found: Sequence[Shared]) -> list[ParameterGroup]:
    """Tie the modules of ``unit`` again, and move up to it the groups whose users it contains.

    ``found`` is what its own modules share with earlier units.

    Returns:
        The groups that moved.
    """
    for one in found:
        one.group.add_owners(one.index, one.owners)
        for owner in one.owners:
            tag_managed_module(owner.module)
    borrowed = {one.group: None for one in found}
    below = _units_in(unit.modules)
    for other in below:
        borrowed.update(dict.fromkeys(other.borrowed))
    inside = {module for root in unit.modules for module in root.modules()}
    moved: list[ParameterGroup] = []
    for group in borrowed:
        if not all(module in inside for module in group.users()):
            unit.borrowed.append(group)
            continue
        for other in below:
            for held in (other.groups, other.borrowed):
                if group in held:
                    held.remove(group)
        moved.append(group)
    unit.groups += moved
    return moved


def check_contained(root: Unit, units: Iterable[Unit]) -> None:
    """Refuse a root which does not contain all modules that use the parameters below it.

    Raises:
        ModuleError: naming the parameters.
    """
    inside = {module for top in root.modules for module in top.modules()}
    for unit in units:
        for group in (*unit.groups, *unit.borrowed):
            if not all(module in inside for module in group.users()):
                raise ModuleError(
                    f"unit '{unit.name}' shares parameters of group '{group.name}' with modules "
                    f"outside of {', '.join(type(m).__name__ for m in root.modules)}, whose "
                    "forward is the outermost. Call fully_shard on a module that contains all "
                    "that use them, after those below it, and run its forward."
                )


def _units_in(modules: Iterable[nn.Module]) -> list[Unit]:
    found = (m.__dict__.get("_polyshard_unit") for root in modules for m in root.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version
