"""The plugin: three switches, a fraction, and what they are made of."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from polyshard import CPUOffloadPolicy, Plugin, grad_norm, hookimpl
from polyshard.errors import IneffectiveSettingWarning
from polyshard.seams import GroupInfo, Observer
from polyshard_offload.__about__ import __version__
from polyshard_offload._torch_private import local_of
from polyshard_offload.errors import OffloadError, SettingError
from polyshard_offload.optimizer.spent import MESSAGE
from polyshard_offload.optimizer.step import StateOffload
from polyshard_offload.optimizer.wrap import check_optimizer, install
from polyshard_offload.report import Memory, measured, notices, predicted
from polyshard_offload.resources import ShelfFactory, Tiers
from polyshard_offload.settings import (
    DiskSettings,
    Tier,
    at_least,
    check_in_backward,
    check_tiers,
    one_of,
)
from polyshard_offload.tiers.host_memory import may_pin

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class WrapWatcher(Observer):
    """Says once when the optimizer state stays where it is because nobody wrapped the optimizer."""

    def __init__(
        self, notices: Callable[[], tuple[str, ...]], flush: Callable[[], None] | None
    ) -> None:
        """Nothing was wrapped yet; ``notices`` says what ``describe()`` shows.

        ``flush``, if any, is called when a group was reduced.
        """
        self.wrapped = False
        self._steps = 0
        self._notices = notices
        self._flush = flush

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        """Where the optimizer state rests, for models whose shards stay on the device."""
        return self._notices()

    @override
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        if self._flush is not None:
            self._flush()

    @override
    def on_step_end(self) -> None:
        """The first step may end before anything is wrapped, the second may not."""
        self._steps += 1
        if self._steps == 2 and not self.wrapped:
            warnings.warn(
                "Offload(optimizer=...) has no effect: the optimizer was not wrapped. Write "
                "optimizer = offload.wrap(torch.optim.AdamW(model.parameters())).",
                IneffectiveSettingWarning,
                stacklevel=2,
            )


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
        prefetch: units whose shards are brought to the device ahead of their gather, and chunks of
            state that are read ahead.
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
        check_tiers(self.params, str(self.grads), str(self.optimizer))
        at_least("Offload(prefetch", self.prefetch, 0)
        at_least("Offload(chunk_bytes", self.chunk_bytes, 1)
        one_of("Offload(pin", self.pin, (True, False, "auto"))
        one_of("Offload(step_in_backward", self.step_in_backward, (True, False))
        if self.step_in_backward:
            check_in_backward(str(self.grads), str(self.optimizer))
        if not 0.0 <= self.fraction <= 1.0:
            raise SettingError(f"Offload(fraction={self.fraction!r}) must be from 0 to 1.")
        if not isinstance(self.disk, DiskSettings):
            raise SettingError(
                f"Offload(disk={self.disk!r}) must be DiskSettings(path=...), got a "
                f"{type(self.disk).__name__}."
            )
        if self.pin is True and not may_pin():
            raise SettingError(
                "Offload(pin=True): there is no accelerator to page-lock memory for; leave "
                "pin='auto', which uses plain memory here."
            )

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
    def tiers(self) -> Tiers:
        """Memory and files of this object."""
        return Tiers(self.disk, self.pin, in_backward=self.step_in_backward)

    @functools.cached_property
    def _watcher(self) -> WrapWatcher:
        return WrapWatcher(self.notices, self._flush if self.step_in_backward else None)

    def _flush(self) -> None:
        for offload in self.tiers.offloads:
            if offload.in_backward is not None:
                offload.in_backward.flush()

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> ShelfFactory | None:
        """A shelf for every group, unless parameters stay on the device."""
        self.tiers.note(group)
        if self.params == "device":
            return None
        return ShelfFactory(self.tiers, self)

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> WrapWatcher | None:
        """Watch where forgetting :meth:`wrap` would go unnoticed."""
        del group
        return self._watcher if self._needs_wrap else None

    @property
    def _needs_wrap(self) -> bool:
        # State on the host beside parameters on the host is what torch makes by itself.
        apart = self.optimizer == "disk" or (self.optimizer == "host" and self.params == "device")
        return apart or self.params == "disk" or self.step_in_backward

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
        if self.optimizer == "device":
            return optimizer
        with self.tiers.reported("(optimizer)"):
            offload = StateOffload(optimizer, self)
        self.tiers.offloads.add(offload)
        return install(optimizer, offload)

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
        self.tiers.count.records_norms = True
        known = self.tiers.norm_of if norm_type == 2 else None
        return grad_norm(parameters, norm_type, known=known)

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
        every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
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
        return notices(self.tiers, str(self.optimizer))

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
