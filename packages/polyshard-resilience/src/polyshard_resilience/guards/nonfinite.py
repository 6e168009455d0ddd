"""Steps that are not made with gradients that are not finite.

[Note: the look at gradients]
The sum of a tensor is finite only if all its elements are, takes one pass and no memory; where it
is not, a second look tells elements that are not finite from finite ones whose sum overflowed. On
an accelerator it is the largest element of all gradients at once, which cannot overflow. A norm
that was just computed for clipping is such a sum as well: then nothing is read, and nothing sent.
A norm speaks only for the gradients it was computed of. Any step, a gradient that takes the place
of another, or a write to one (a backward that adds to it) ends that.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from polyshard._torch.private import local_tensor
from polyshard._torch.whole_rows import WholeRows
from polyshard.clipping import by_kind, clip_grads_with_norm_, grad_norm, local_gradients
from polyshard.errors import NonFiniteError, SettingError
from polyshard_resilience.errors import SkippedStepWarning
from polyshard_resilience.guards.names import (
    check_optimizer,
    check_steps_alone,
    listed,
    names_of,
    parameters_of,
)
from polyshard_resilience.guards.peers import Peers, are_same, meshes_of, ranks_in_words, this_rank

Action = Literal["stop", "skip"]
Step = Callable[..., Any]
_PIECE_NUMEL = 1 << 20
_Seen = list[tuple[TensorWeakRef, int, int] | None]


@dataclass(frozen=True)
class _Found:
    """Elements of one gradient that are not finite, on one rank."""

    place: int
    name: str
    rank: int
    count: int
    numel: int


class _SkippedError(Exception):
    """The way out of an optimizer's step from within its closure."""

    def __init__(self, loss: object) -> None:
        super().__init__()
        self.loss = loss


class NonFinite:
    """Has an optimizer make no step with gradients that are infinite or not numbers.

    ``optimizer.step()`` looks at the gradients first, and all ranks that train its parameters do
    the same: none steps if any has found something. With a ``GradScaler``, steps that the scaler
    skips stay its own business. The guard lasts as long as the optimizer.

    Attributes:
        skipped: how many steps were left out.
        in_a_row: how many of those since the last that was made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        action: Action = "stop",
        *,
        model: nn.Module | None = None,
        give_up_after: int = 10,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Guard ``optimizer`` from its next step on.

        Args:
            optimizer: any of torch's or made like them; also one that was wrapped for offload.
            action: ``"stop"`` raises. ``"skip"`` leaves the step out, as ``GradScaler`` does: the
                optimizer's ``step`` and its hooks do not run, weights and state stay as they are,
                gradients too (the loop's ``zero_grad()`` comes next), and a warning names them.
            model: gives parameters their names; without it they are told by their place.
            give_up_after: raise when so many steps in a row would have to be left out.
            group: of the ranks that decide together, where they are not those of the parameters'
                meshes.

        Raises:
            SettingError: for anything else.
        """
        check_optimizer(optimizer, "guards.NonFinite")
        if action not in get_args(Action):
            raise SettingError(f"action={action!r}: guards.NonFinite takes 'stop' or 'skip'.")
        if give_up_after < 1:
            raise SettingError(f"give_up_after={give_up_after}: it is at least 1.")
        check_steps_alone(optimizer, "guards.NonFinite")
        self.skipped = 0
        self.in_a_row = 0
        self._action = action
        self._limit = give_up_after
        self._group = group
        self._optimizer = weakref.ref(optimizer)
        self._model = None if model is None else weakref.ref(model)
        self._peers: tuple[list[DeviceMesh], Peers] | None = None
        self._finite: _Seen | None = None
        self._is_on = True
        _wrap_step(optimizer, self)

    def remove(self) -> None:
        """Guard no longer."""
        self._is_on = False

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint; the same on all ranks."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from those of a checkpoint."""
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As :func:`polyshard.clip_grad_norm_` of the optimizer's gradients, which it looks at.

        A finite norm says that all gradients are, so the step that follows neither reads them nor
        asks the other ranks. Where it is not finite gradients stay as they are, so that the step
        can name those that are not.

        Returns:
            The norm before clipping, the same on all ranks.
        """
        parameters = parameters_of(self._of())
        total = grad_norm(parameters, norm_type)
        self._finite = None
        if bool(torch.isfinite(total)):
            clip_grads_with_norm_(parameters, max_norm, total)
            # A maximum over ranks may lose what is not a number; a sum of powers cannot.
            if 0 < norm_type < math.inf:
                self._finite = _seen(parameters)
        return total

    def _of(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise SettingError("the optimizer of this guards.NonFinite is gone.")
        return optimizer

    # --- the step -----------------------------------------------------------------------------

    def run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``step(*args, **kwargs)``, unless gradients say no."""
        optimizer = self._of()
        if not self._is_on or _is_scaled(optimizer):
            self._finite = None
            return step(*args, **kwargs)
        check_steps_alone(optimizer, "guards.NonFinite")
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            checked = self._checked(closure)
            args, kwargs = (
                ((checked, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": checked})
            )
            try:
                return step(*args, **kwargs)
            except _SkippedError as skipped:
                return skipped.loss
        return step(*args, **kwargs) if self._clears() else None

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which the gradients are looked at: it is what makes them."""
        calls = 0

        def checked() -> Any:
            nonlocal calls
            loss = closure()
            calls += 1
            if self._clears(may_skip=calls == 1):
                return loss
            raise _SkippedError(loss)

        return checked

    @torch.no_grad()
    def _clears(self, *, may_skip: bool = True) -> bool:
        """Whether the step may be made, the same on all ranks.

        Raises:
            NonFiniteError: on every rank, when it may not and is not to be left out.
        """
        optimizer = self._of()
        parameters = parameters_of(optimizer)
        finite, self._finite = self._finite, None
        is_known = finite is not None and _are_as_seen(parameters, finite)
        peers = self._peers_of(parameters)
        if is_known or not peers.any(_are_suspect(local_gradients(parameters), peers.device)):
            self.in_a_row = 0
            return True
        text = self._said(optimizer, peers)
        if self._action == "stop" or not may_skip:
            more = (
                "" if may_skip else " The optimizer is in the middle of a step: load a checkpoint."
            )
            raise NonFiniteError(f"{text} Nothing was stepped.{more}")
        if self.in_a_row + 1 >= self._limit:
            raise NonFiniteError(
                f"{text} {self.in_a_row} steps before this one were left out as well, and "
                f"give_up_after={self._limit}: the run does not recover. Load a checkpoint from "
                "before, and look at the learning rate and the data since."
            )
        self.skipped += 1
        self.in_a_row += 1
        warnings.warn(f"{text} The step was left out.", SkippedStepWarning, stacklevel=6)
        return False

    def _peers_of(self, parameters: Sequence[Tensor]) -> Peers:
        meshes = meshes_of(parameters)
        if self._peers is None or not are_same(self._peers[0], meshes):
            self._peers = meshes, Peers(parameters, self._group)
        return self._peers[1]

    def _said(self, optimizer: Optimizer, peers: Peers) -> str:
        """Which gradients are not finite, and where."""
        model = None if self._model is None else self._model()
        names = names_of(optimizer, model)
        every = peers.union(list(_found_in(parameters_of(optimizer), names)))
        by_name: dict[str, list[_Found]] = {}
        for found in sorted(every, key=lambda one: (one.place, one.rank)):
            by_name.setdefault(found.name, []).append(found)
        words = [
            f"'{name}' ({founds[0].count} of {founds[0].numel} elements on rank {founds[0].rank}"
            + (f", also on {ranks_in_words(f.rank for f in founds[1:])})" if founds[1:] else ")")
            for name, founds in by_name.items()
        ]
        kind = type(optimizer).__name__
        return f"gradients are not finite when {kind} is to step: {listed(words)}."


def _wrap_step(optimizer: Optimizer, guard: NonFinite) -> None:
    """Put the guard around ``optimizer.step``, on the object, as schedulers do.

    The wrapper holds the optimizer weakly, so that it is freed as it would be without.
    """
    held = weakref.ref(optimizer)
    inner: Any = optimizer.step
    function: Any = getattr(inner, "__func__", None)  # of a method; a scheduler leaves a function
    inner_step: Any = None if function is not None else inner

    def guarded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        step = inner_step if function is None else function.__get__(self, type(self))
        return guard.run(step, args, kwargs)

    @functools.wraps(inner if function is None else function)
    def step(*args: Any, **kwargs: Any) -> Any:
        return guarded(held(), *args, **kwargs)  # type: ignore[arg-type]

    step.__func__ = guarded  # type: ignore[attr-defined]  # schedulers take it for a method
    optimizer.step = step  # type: ignore[method-assign]


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a ``GradScaler`` has the optimizer's own kernels look, as fused ones do."""
    return getattr(optimizer, "found_inf", None) is not None


def _seen(parameters: Sequence[Tensor]) -> _Seen:
    """Which gradients there are, and how often each was written to; keeps none alive."""
    return [
        None if p.grad is None else (TensorWeakRef(p.grad), *_writes(p.grad)) for p in parameters
    ]


def _are_as_seen(parameters: Sequence[Tensor], seen: _Seen) -> bool:
    return len(parameters) == len(seen) and all(
        parameter.grad is None
        if one is None
        else parameter.grad is one[0]() and _writes(parameter.grad) == one[1:]
        for parameter, one in zip(parameters, seen, strict=True)
    )


def _writes(gradient: Tensor) -> tuple[int, int]:
    local = local_tensor(gradient) if isinstance(gradient, DTensor) else gradient
    return local._version, local.writes if isinstance(local, WholeRows) else 0


def _are_suspect(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any is not finite (0-dim bool on ``device``). See [Note: the look at gradients]."""
    found = []
    for same in by_kind(_dense(gradients)):
        if same[0].device.type == "cpu":
            if not all(_is_finite(gradient) for gradient in same):
                return torch.ones((), dtype=torch.bool, device=device)
        else:
            largest = torch.stack(torch._foreach_norm(same, math.inf))
            found.append(largest.isfinite().all().logical_not().to(device))
    if not found:
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack(found).any()


def _dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    plain = (g.whole if isinstance(g, WholeRows) else g for g in gradients)
    return [g.coalesce().values() if g.is_sparse else g for g in plain]


def _is_finite(values: Tensor) -> bool:
    return bool(values.sum().isfinite()) or not _count(values)


def _count(values: Tensor) -> int:
    """How many elements are not finite; in pieces, so that it needs little memory."""
    pieces = values.reshape(-1).split(_PIECE_NUMEL)
    return sum(piece.numel() - int(piece.isfinite().sum()) for piece in pieces)


def _found_in(parameters: Sequence[Tensor], names: Sequence[str]) -> Sequence[_Found]:
    found = []
    for place, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        for local in _dense(local_gradients([parameter])):
            if count := _count(local):
                found.append(_Found(place, name, this_rank(), count, local.numel()))
    return found
