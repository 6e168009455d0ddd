"""What of a module is sharded, and how: the settings of the strategy, and their use.

[Note: steps]
Lightning calls ``training_step`` and its like, which use ``forward``, submodules and parameters of
the module in any order. So those are forward methods of the outermost unit, and its parameters stay
gathered after a ``forward`` within them: until backward ends, or evaluation does. Under manual
optimization backward is a part of ``training_step``, which then is no such method.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel

from polyshard import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from polyshard.errors import ModuleError, SettingError
from polyshard_checkpoint import load_pretrained
from polyshard_cli.plan import PlanError, units_of

__all__ = ["STEPS", "Sharding", "watch_steps"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""What Lightning calls instead of ``forward``."""


@dataclass(frozen=True)
class Sharding:
    """How :meth:`apply` shards a module.

    Attributes:
        plugins: as of ``polyshard.fully_shard``, for every unit.
        units: patterns of names of modules that become units, as ``polyshard plan`` has them; none:
            members of module lists.
        mp_policy: as of ``polyshard.fully_shard``, for every unit.
        reshard_after_forward: the same, for every unit but the module itself.
        pretrained: a folder to fill the model of transformers within the module from, once it is
            sharded.
    """

    plugins: Sequence[object | str] = ()
    units: Sequence[str] = ()
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    pretrained: str | os.PathLike[str] | None = None

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard ``module`` over ``mesh``; what ``configure_model`` has sharded stays as it is.

        Raises:
            ModuleError: for modules that another engine has, and parameters without memory.
            SettingError: when these settings would not reach what is sharded already, or no module
                is called as in ``units``; when there is not one model for ``pretrained``.
            CheckpointError: when the folder of ``pretrained`` does not fit.
        """
        inside = None if self.pretrained is None else _model_within(module)
        if not isinstance(module, FSDPModule):
            _refuse_other_engines(module)
            _refuse_meta(module, inside)
            self._shard(module, mesh)
        elif inside is None or not any(p.is_meta for p in inside.parameters()):
            return
        if self.pretrained is not None and inside is not None:
            load_pretrained(inside, self.pretrained)

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        keywords: dict[str, Any] = {"mesh": mesh, "plugins": self.plugins}
        if self.mp_policy is not None:
            keywords["mp_policy"] = self.mp_policy
        if any(isinstance(one, FSDPModule) for one in module.modules()):
            self._refuse_settings(module)
        else:
            for unit in self._units(module):
                called: Any = list(unit) if len(unit) > 1 else unit[0]
                fully_shard(
                    called,
                    reshard_after_forward=self.reshard_after_forward,
                    **keywords,
                )
        # Never freed between forward and backward: see the note above.
        fully_shard(module, reshard_after_forward=False, **keywords)

    def _units(self, module: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
        try:
            found = units_of(module, tuple(self.units))
        except PlanError as error:
            raise SettingError(f"PolyshardStrategy: {error}") from error
        yield from found.values()

    def _refuse_settings(self, module: nn.Module) -> None:
        given = [
            field.name
            for field in fields(self)
            if field.name != "pretrained" and getattr(self, field.name) != field.default
        ]
        if given:
            raise SettingError(
                f"PolyshardStrategy was given {', '.join(given)}, but configure_model of "
                f"{type(module).__name__} shards modules itself, which these do not reach. Pass "
                "them to fully_shard there, or leave the sharding to the strategy."
            )


def watch_steps(module: nn.Module, *, is_automatic: bool) -> None:
    """Have what Lightning calls gather parameters. See [Note: steps].

    Args:
        module: sharded by polyshard.
        is_automatic: whether Lightning calls backward and steps.
    """
    for name in STEPS if is_automatic else STEPS[1:]:
        if callable(getattr(module, name, None)) and name not in vars(module):
            register_fsdp_forward_method(module, name)


def _refuse_other_engines(module: nn.Module) -> None:
    for name, one in module.named_modules():
        kind = None
        if isinstance(one, FullyShardedDataParallel):
            kind = "FullyShardedDataParallel"
        elif isinstance(one, TorchFSDPModule) and not isinstance(one, FSDPModule):
            kind = "torch.distributed.fsdp.fully_shard"
        if kind is not None:
            raise ModuleError(
                f"PolyshardStrategy: '{name or type(one).__name__}' is sharded by {kind} already. "
                "Import fully_shard from polyshard in configure_model, or leave the sharding to "
                "the strategy."
            )


def _model_within(module: nn.Module) -> nn.Module:
    """The one model of transformers, or of peft, in ``module``."""
    found: list[tuple[str, nn.Module]] = []
    for name, one in module.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not is_inside and callable(getattr(one, "save_pretrained", None)):
            found.append((name, one))
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise SettingError(
            f"PolyshardStrategy(pretrained=...) fills one model of transformers, and "
            f"{type(module).__name__} has {names}. Call polyshard_checkpoint.load_pretrained for "
            "each in on_fit_start."
        )
    return found[0][1]


def _refuse_meta(module: nn.Module, filled: nn.Module | None) -> None:
    will_be = set() if filled is None else {id(parameter) for parameter in filled.parameters()}
    names = [n for n, p in module.named_parameters() if p.is_meta and id(p) not in will_be]
    if names:
        raise ModuleError(
            f"PolyshardStrategy: {len(names)} parameters are on the meta device, '{names[0]}' for "
            "one. Pass pretrained=, the folder of a model of transformers; or shard them in "
            "configure_model and give them values there, by "
            "polyshard_checkpoint.load_pretrained for example."
        )
