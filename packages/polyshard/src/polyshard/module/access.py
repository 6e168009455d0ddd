"""From a sharded module to the units and groups that its methods act on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from polyshard.engine.root import unit_of, units_below
from polyshard.engine.unit import Unit
from polyshard.errors import LifecycleError, SettingError
from polyshard.group.group import ParameterGroup


class Access(TorchFSDPModule):
    """What every method of a sharded module begins with."""

    def _unit(self) -> Unit:
        unit = unit_of(self)  # type: ignore[arg-type]
        assert unit is not None
        return unit

    def _root_unit(self, caller: str) -> Unit:
        """The unit, which must not be known to lie below another one."""
        unit = self._unit()
        if unit.is_root is False:
            raise LifecycleError(
                f"{caller}() was called on '{unit.name}', which is not the root. Call it on the "
                "outermost sharded module."
            )
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        return [unit for _, _, unit in units_below(self)]  # type: ignore[arg-type]

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        return [group for unit in self._units(recurse) for group in unit.groups]


def units_of(modules: Sequence[TorchFSDPModule], caller: str) -> tuple[Unit, ...]:
    """The units of ``modules``.

    Raises:
        SettingError: for what is not sharded, naming the ``caller`` that was given it.
    """
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise SettingError(
                f"{caller} takes modules that fully_shard was applied to, got "
                f"{type(module).__name__}."
            )
        units.append(unit)
    return tuple(units)
