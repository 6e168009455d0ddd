"""What of a model is sharded, and how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from polyshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from polyshard.errors import ModuleError, SettingError
from polyshard_checkpoint import load_pretrained
from polyshard_cli.plan import PlanError, units_of

__all__ = ["Sharding", "reshard"]


@dataclass(frozen=True)
class Sharding:
    """Settings of ``polyshard.fully_shard`` for a model, and which modules become units.

    Attributes:
        plugins: for every unit.
        units: patterns of names of modules (``model.layers.*``), as ``polyshard plan --units`` has
            them; none: members of every outermost ``nn.ModuleList``.
        mesh: with one axis, or with ``(replicas, ranks of a shard)``; by default of all ranks.
        mp_policy: what units compute and reduce in; by default that is left to the framework.
        reshard_after_forward: for every unit but the model itself.
        flat: whether optimizers step runs of shards (``polyshard_optimizers.flat``).
        pretrained: a folder to fill the model from once it is sharded
            (``polyshard_checkpoint.load_pretrained``): build it under ``torch.device("meta")``, and
            no rank ever holds it whole.
    """

    plugins: Sequence[object | str] = ()
    units: Sequence[str] = ()
    mesh: DeviceMesh | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    flat: bool = False
    pretrained: str | os.PathLike[str] | None = None

    def apply(self, model: nn.Module) -> None:
        """Shard ``model``; one that polyshard has sharded stays as it is.

        Raises:
            ModuleError: for a model that torch's engine has sharded, or parts of which are sharded.
            SettingError: when no module is called as in ``units``.
            CheckpointError: when the folder of ``pretrained`` does not fit.
        """
        if not isinstance(model, FSDPModule):
            self._shard(model)
        elif not any(parameter.is_meta for parameter in model.parameters()):
            return
        if self.pretrained is not None:
            load_pretrained(model, self.pretrained)

    def _shard(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, TorchFSDPModule):
                ours = isinstance(module, FSDPModule)
                raise ModuleError(
                    f"'{name or type(module).__name__}' is sharded already, by "
                    f"{'polyshard' if ours else 'torch'}, and the model around it is not. Shard "
                    "all of the model with polyshard.fully_shard, or none of it."
                )
        keywords: dict[str, Any] = {"mesh": self.mesh, "plugins": self.plugins}
        if self.mp_policy is not None:
            keywords["mp_policy"] = self.mp_policy
        try:
            units = units_of(model, tuple(self.units))
        except PlanError as error:
            raise SettingError(f"Sharding(units={self.units!r}): {error}") from error
        for unit in units.values():
            called: Any = list(unit) if len(unit) > 1 else unit[0]
            fully_shard(
                called,
                reshard_after_forward=self.reshard_after_forward,
                **keywords,
            )
        fully_shard(model, **keywords)


def reshard(model: nn.Module) -> None:
    """Have ``model`` show its sharded parameters, those that an evaluation left gathered too."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
