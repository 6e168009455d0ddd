"""Makes the steps of an optimizer instead of its class: the one place where that is swapped.

[Note: steps]
The optimizer object stays; its class becomes a subclass whose ``step`` is made by twins (see
[Note: twins]): over the runs of its parameters (see [Note: runs]) if it is elementwise, and over
parameters whose state a keeper lends, each a run of its own. Groups, state and state dicts stay
those of parameters.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from polyshard._torch.optimizers import local_of, profiled, state_of
from polyshard._torch.private import untraced
from polyshard_optimizers.stepping.chunks import Batch, Chunk, Mode, Run, batches_of
from polyshard_optimizers.stepping.elementwise import reason_against
from polyshard_optimizers.stepping.keeper import Lent, OptimizerKeeper
from polyshard_optimizers.stepping.members import member_of
from polyshard_optimizers.stepping.plan import Plan
from polyshard_optimizers.stepping.twins import Twins


class Stepper:
    """Steps one optimizer: by a plan of runs, made anew when it does not hold, and what is lent.

    ``Stepper.of(optimizer)`` is the one it has, if any. ``kind`` is the class that the user made it
    of; ``by_runs`` says whether that is elementwise: any other steps whole parameters, each with
    the operations of its own kind of tensor. A keeper sets ``plan`` to ``None`` when it answers
    anew what is lent or pinned.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """``optimizer`` is of the user's class still."""
        self.kind = type(optimizer)
        self.by_runs = reason_against(optimizer, self.kind) is None
        self.plan: Plan | None = None
        self.twins = Twins(optimizer, self.kind)
        self._optimizer = optimizer
        self._keeper: OptimizerKeeper | None = None

    @classmethod
    def of(cls, optimizer: Optimizer) -> Stepper | None:
        """What steps ``optimizer``, if that is no longer its class alone."""
        return optimizer._polyshard_flat if isinstance(optimizer, SteppedOptimizer) else None

    def take_over(
        self,
        optimizer: Optimizer,
        mixin: Any = None,
        keeper: OptimizerKeeper | None = None,
    ) -> None:
        """Make the steps of ``optimizer`` from now on, which gets ``mixin`` into its class."""
        if keeper is not None:
            self._keeper = keeper
            self.twins = Twins(optimizer, self.kind, keeper.error, keeper.remedy)
        self.plan = None
        made = _class_of(cast("Any", self.kind), cast("Any", mixin or SteppedOptimizer))
        optimizer.__class__ = cast("Any", made)
        optimizer.__dict__["_polyshard_flat"] = self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What the optimizer's ``step`` does."""
        if self._keeper is not None:
            return self._keeper.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.twins.begin()
        self.step_runs()
        self.twins.end()
        return loss

    def step_runs(self) -> None:
        """Step every parameter that has a gradient and is not lent, if the optimizer has runs."""
        if not self.by_runs:
            return
        plan = self.plan
        if plan is None or not plan.holds():
            self.plan = None  # before another one takes memory
            plan = self.plan = Plan(self._optimizer, self.twins, self._keeper)
        try:
            plan.step()
        except BaseException:
            self.plan = None  # its counters may be ahead of what people see, and roll back
            raise

    def state_was_shown(self) -> None:
        """Other code reads the state of the optimizer, and may keep and change it."""
        if self.plan is not None:
            self.plan.seal.open()

    @torch.no_grad()
    def lend(self, parts: Sequence[Lent]) -> None:
        """Step parameters with the state that comes with them."""
        filled: list[tuple[Lent, Run]] = []
        whole: list[Lent] = []
        for lent in sorted(parts, key=lambda lent: lent.group):
            member = member_of(lent.key, lent.group, lent.state) if self.by_runs else None
            if member is None:
                whole.append(lent)
                continue
            member.is_pinned = True
            group = self._optimizer.param_groups[lent.group]
            assert lent.key.grad is not None
            run = Run([member], Mode.of(group, member.local.device), local_of(lent.key.grad))
            if run.is_fresh:
                run.first_step(self.twins)
                self._show(lent, run)
            else:
                run.lend_scalars()
                filled.append((lent, run))
        self._step_filled(filled)
        self._step_whole(whole)

    def _step_filled(self, runs: list[tuple[Lent, Run]]) -> None:
        for batch in batches_of(run for _, run in runs):
            self.twins.step(batch.parts, batch.state)
        for lent, run in runs:
            lent.is_settled = run.settle()
            if not lent.is_settled:
                self._show(lent, run)

    def _show(self, lent: Lent, run: Run) -> None:
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        run.publish(self.kind.__name__, states)
        lent.state = states[lent.key]

    def _step_whole(self, parts: Sequence[Lent]) -> None:
        batch = Batch()
        chunks = [Chunk(lent.key, 0, lent.key.numel(), lent.state) for lent in parts]
        for lent, chunk in zip(parts, chunks, strict=True):
            batch.add(lent.group, chunk)
        self.twins.step(batch.parts, batch.state)
        for lent, chunk in zip(parts, chunks, strict=True):
            chunk.state = batch.state[lent.key]
            lent.is_settled = bool(lent.state) and chunk.settle()
            lent.state = chunk.state


class SteppedOptimizer(Optimizer):
    """Mixed into the class of an optimizer whose steps a :class:`Stepper` makes."""

    class_prefix: ClassVar[str] = ""
    """Of the name of its class: by default profilers and messages say what the user has made."""
    _polyshard_flat: Stepper

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the user's class: plans belong to one process and object."""
        return object.__new__, (self._polyshard_flat.kind,), self.__getstate__()


@untraced
def _step(self: SteppedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Step all parameters that have a gradient."""
    return self._polyshard_flat.step(closure)


def _show_state(self: SteppedOptimizer) -> defaultdict[Any, Any]:
    """State by parameter. See [Note: sealed state]."""
    state = state_of(self)  # held while the seal opens: no other thread closes it in between
    self._polyshard_flat.state_was_shown()
    return state


def _replace_state(self: SteppedOptimizer, state: defaultdict[Any, Any]) -> None:
    self.__dict__["state"] = state


@functools.cache
def _class_of(kind: type[Optimizer], mixin: type[SteppedOptimizer]) -> type[SteppedOptimizer]:
    names = {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    state = property(_show_state, _replace_state)
    members = {"step": profiled(_step), "state": state, **names}
    made = type(mixin.class_prefix + kind.__name__, (mixin, kind), members)
    return cast("type[SteppedOptimizer]", made)
