"""The plugin: three switches, a fraction, and what they are made of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from polyshard import CPUOffloadPolicy, Plugin, grad_norm, hookimpl
from polyshard.clipping import resting
from polyshard.plugins.seams import GroupInfo, StorageFactory, local_of
from polyshard_offload.__about__ import __version__
from polyshard_offload.errors import OffloadError
from polyshard_offload.observer import WrapWatcher
from polyshard_offload.optimizer.spent import MESSAGE
from polyshard_offload.optimizer.step_in_backward import BackwardSteps
from polyshard_offload.optimizer.wrap import Wrapping, check_optimizer, wrap
from polyshard_offload.report import Memory, measured, notices, predicted
from polyshard_offload.resources import Resources, TierStorageFactory
from polyshard_offload.settings import DiskSettings, OffloadSettings, Tier
from polyshard_offload.shards.device_storage import HoldingStorageFactory

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


@dataclass(frozen=True, eq=False, kw_only=True)
class Offload(Plugin):
    """Says where parameters, gradients and optimizer state rest between uses.

    Pass one object to all ``fully_shard`` calls of a model, and the optimizer to :meth:`wrap`.

    Attributes:
        params: tier of the sharded parameters.
        grads: tier of the sharded gradients; left out, beside the parameters.
        optimizer: tier of the optimizer state; left out, beside the parameters.
        fraction: part of the optimizer state (by elements of its parameters, in their order) that
            goes to its tier; the rest stays beside the parameters.
        pin: page-lock host memory; ``"auto"`` does where there is an accelerator.
        prefetch: units whose shards are read from disk ahead of their gather, and chunks of state
            that are read ahead. Shards in host memory come with their gather.
        chunk_bytes: state that is stepped at once; a parameter whose state is larger is a chunk.
        disk: how the disk tier uses its file system.
        step_in_backward: step each parameter as soon as its gradient is reduced, and free that;
            ``optimizer.step()`` then only ends the step. Nothing may look at gradients after
            backward (clipping, ``GradScaler``, sums over reductions): it is an error.
    """

    name: ClassVar[str] = "offload"
    version: ClassVar[str] = __version__

    params: Tier = "device"
    grads: Tier | None = None
    optimizer: Tier | None = None
    fraction: float = 1.0
    pin: bool | Literal["auto"] = "auto"
    prefetch: int = 2
    chunk_bytes: int = 64 << 20
    disk: DiskSettings = field(default_factory=DiskSettings)
    step_in_backward: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            SettingError: naming the setting, the reason and what to choose.
        """
        beside: Tier = "device" if self.params == "device" else "host"
        if self.grads is None:
            object.__setattr__(self, "grads", beside)
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", beside)
        _ = self._settings  # made now, so that what cannot work is refused here

    @functools.cached_property
    def _settings(self) -> OffloadSettings:
        """What was chosen, without the plugin around it."""
        chosen = {f.name: getattr(self, f.name) for f in fields(OffloadSettings)}
        return OffloadSettings(**chosen)

    # Presets ----------------------------------------------------------------------------------

    @classmethod
    def cpu(cls, pin: bool | Literal["auto"] = "auto") -> Offload:
        """Everything on the host: what torch's ``CPUOffloadPolicy`` does."""
        return cls(params="host", grads="host", optimizer="host", pin=pin)

    @classmethod
    def optimizer_only(cls, tier: Tier = "host") -> Offload:
        """Only the optimizer state leaves the device."""
        return cls(optimizer=tier)

    @classmethod
    def on_disk(cls, path: str | Path) -> Offload:
        """Everything on the disk of ``path``."""
        settings = DiskSettings(path=Path(path))
        return cls(params="disk", grads="disk", optimizer="disk", disk=settings)

    def for_policy(self, policy: CPUOffloadPolicy) -> Offload:
        """The plugin that ``fully_shard(offload_policy=policy)`` stands for."""
        return replace(self, pin="auto" if policy.pin_memory else False)

    # What the engine asks ---------------------------------------------------------------------

    @functools.cached_property
    def tiers(self) -> Resources:
        """Memory and files of this object."""
        return Resources(self._settings)

    @functools.cached_property
    def _wrappings(self) -> weakref.WeakSet[Wrapping]:
        """Of the optimizers wrapped so far; each lives with its optimizer."""
        return weakref.WeakSet()

    @functools.cached_property
    def _watcher(self) -> WrapWatcher:
        return WrapWatcher(self.notices, self._early_steps if self.step_in_backward else None)

    def _early_steps(self) -> list[BackwardSteps]:
        every = (wrapping.in_backward for wrapping in self._wrappings)
        return [steps for steps in every if steps is not None]

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StorageFactory | None:
        """A place for the shard of every group, unless parameters stay on the device.

        There they may still be stepped in backward, for which gradients have to come once.
        """
        self.tiers.note(group)
        if self.params == "device":
            return HoldingStorageFactory() if self.step_in_backward else None
        return TierStorageFactory(self.tiers, self.notices)

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> WrapWatcher | None:
        """Watch where forgetting :meth:`wrap` would go unnoticed."""
        del group
        return self._watcher if self._settings.needs_wrap else None

    # What a user calls ------------------------------------------------------------------------

    def wrap(self, optimizer: Opt) -> Opt:
        """Have ``optimizer`` keep its state on the chosen tier.

        The same object is returned, with another class (a subclass of its own): parameter groups,
        schedulers made from it and references to it stay valid. Call it after ``fully_shard`` and
        before schedulers are made.

        Args:
            optimizer: any optimizer that needs no closure and treats parameters one by one.

        Raises:
            OffloadError: for one that cannot be wrapped, saying why.
            StorageError: when the disk has no room for the state.
        """
        check_optimizer(optimizer)
        self._watcher.wrapped = True
        if self.optimizer != "device":
            self._wrappings.add(wrap(optimizer, self.tiers))
        return optimizer

    def grad_norm(self, parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The total norm of all gradients; those that left the device are not read for it.

        From the first call on, norms are taken before gradients are moved. They are read where
        that did not happen, where gradients were changed or added to since, and for norms other
        than the 2-norm.

        Args:
            parameters: as of :func:`polyshard.clip_grad_norm_`, on any mix of meshes.
            norm_type: the ``p`` of the p-norm, as of :func:`polyshard.clip_grad_norm_`.

        Returns:
            A plain 0-dim tensor, the same on all ranks.

        Raises:
            OffloadError: for other norms of gradients that a step in backward has used.
        """
        self.tiers.staging.records_norms = True
        known = self._norm_of if norm_type == 2 else None
        return grad_norm(parameters, norm_type, known=known)

    def _norm_of(self, parameter: Tensor) -> Tensor | None:
        """The 2-norm of the local part of a gradient, where it is known without reading it."""
        found = self.tiers.norm_of(parameter)
        if found is not None:
            return found
        spent = (steps.norm_of(parameter) for steps in self._early_steps())
        return next((norm for norm in spent if norm is not None), None)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """What :func:`polyshard.clip_grad_norm_` does, with the norm of :meth:`grad_norm`.

        Gradients are read only if they have to be scaled.

        Returns:
            The norm before clipping.

        Raises:
            OffloadError: with ``step_in_backward=True``, where it is too late.
        """
        if self.step_in_backward:
            raise OffloadError(MESSAGE)
        every = resting(parameters)
        norm = self.grad_norm(every, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if not bool(factor == 1.0):  # also if it is not a number
            for gradient in (p.grad for p in every):
                if gradient is not None:
                    local = local_of(gradient)
                    local.mul_(factor.to(local.device))
        return norm

    def notices(self) -> tuple[str, ...]:
        """What ``polyshard.describe(model)`` shows of the tiers: bytes at rest and in passing.

        Complete once the optimizer is wrapped.
        """
        return notices(self.tiers, [wrapping.offload for wrapping in self._wrappings])

    def memory(self, *optimizers: torch.optim.Optimizer) -> Memory:
        """What the tiers take on this rank while training, in bytes; predicted.

        Args:
            optimizers: wrapped ones, whose state and buffers are to be counted.
        """
        return predicted(self.tiers, optimizers)

    def measured_memory(self, *optimizers: torch.optim.Optimizer) -> Memory:
        """What the tiers took at most on this rank so far, in bytes."""
        return measured(self.tiers, optimizers)


def cpu_offload() -> Offload:
    """The plugin as installed under the name ``offload``: see :meth:`Offload.cpu`."""
    return Offload.cpu()
