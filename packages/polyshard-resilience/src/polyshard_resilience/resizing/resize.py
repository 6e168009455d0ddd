"""``resize(model, optimizer, group)``: the ranks that hold a model become others.

[Note: a resize]
Ranks first tell each other what they have and where they will be, which decides every transfer.
Each then makes all that it will need, and comes to a ballot (see [Note: ballots]): memory that runs
out has cost nothing yet. Rows move, and a second ballot says whether all have arrived everywhere.
Only then do ranks let go of what they had; nothing of that can fail, or waits for another.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard._torch.private import local_tensor
from polyshard.engine.collect import move
from polyshard.engine.resizing import Resizing
from polyshard.errors import LifecycleError, PeerError, SettingError, UnsupportedError
from polyshard.params.parameter import ShardedParameter
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.alarm.peers import go_on, tell
from polyshard_resilience.alarm.reports import NOBODY
from polyshard_resilience.errors import ResizeError
from polyshard_resilience.handler import check_enabled, refusal_of
from polyshard_resilience.resizing.exchange import Exchange, Moving
from polyshard_resilience.resizing.optimizers import (
    PARAMS,
    Like,
    OptimizerForm,
    State,
    check_optimizers,
    parameters_of,
    value_of,
)
from polyshard_resilience.resizing.seats import Seats
from polyshard_resilience.rollback.verdict import DONE, READY, Ballot, Kind, Verdict, go_back


@dataclass(frozen=True)
class Resized:
    """What :func:`resize` did on this rank.

    Attributes:
        sent_bytes: of parameters, optimizer state and buffers, to other ranks.
        received_bytes: of the same, from other ranks.
        notes: a sentence for each plugin whose state began anew.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    notes: tuple[str, ...] = ()


def resize(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    group: dist.ProcessGroup | None,
    *,
    among: dist.ProcessGroup | None = None,
) -> Resized:
    """Have the ranks of ``group`` hold ``model``, instead of those that do now.

    Call it between steps, after ``optimizer.zero_grad()``, on every rank of ``among``. A rank that
    joins brings the same model and optimizers, with all sharded parameters on the meta device:
    built there, sharded by the same calls over any 1-D mesh that it is in (of itself alone, say),
    or left by an earlier call. A rank that leaves ends with its model there, which cannot run.
    Rows of parameters and optimizer state go straight to their new owners. A rank that joins also
    gets buffers, ignored parameters and the optimizers' settings.

    Parameter objects stay. What plugins keep for a number of ranks (error feedback) begins anew,
    as when a checkpoint is loaded by another number.

    Args:
        model: the outermost module, sharded over one mesh axis.
        optimizers: all that step its parameters.
        group: whose ranks, in its order, are to hold the model. On a rank that leaves ``None``, or
            what ``torch.distributed.new_group`` gives a rank that is not a member.
        among: of all ranks that hold the model now or will; by default all.

    Raises:
        ResizeError: on every rank, when it failed on any. All have what they had.
        LifecycleError: without :func:`~polyshard_resilience.enable`, among several ranks.
    """
    every = among or cast("dist.ProcessGroup", dist.group.WORLD)
    ranks = dist.get_process_group_ranks(every)
    check_enabled(ranks, "resize()")
    several = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
    to = group if isinstance(group, dist.ProcessGroup) else None  # torch has a word for no group
    return _together(ranks, _Resize(model, several, to, every))


def _together(ranks: Sequence[int], work: _Resize) -> Resized:
    """Do ``work`` on all ranks or none. See [Note: a resize]."""
    ballot, error = Ballot(ranks, 0), None
    verdict, name = Verdict(), READY
    try:
        for name, act in ((READY, work.prepare), (DONE, work.exchange)):
            try:
                act()
                error = None
            except Exception as raised:
                error = _explained(raised)
            verdict = ballot.cast(name, error)
            if not verdict:
                break
    except BaseException as ends:
        ballot.leave(name, ends)
        tell(ends)
        work.undo()
        raise
    if not verdict:
        raise _refusal(go_back(ballot, verdict, work.undo)) from error
    return work.commit()


def _explained(error: Exception) -> Exception:
    """``error``, or that of the rank whose failure it follows; ranks that wait are told of it."""
    if isinstance(error, RuntimeError):
        error = refusal_of(error) or error
    tell(error)
    return error


def _refusal(verdict: Verdict) -> ResizeError:
    said = verdict.said
    each = (f"rank {rank}: {text}" if rank != NOBODY else text for rank, text in said.items())
    text = f"resize() failed: {'; '.join(each)}. Every rank has the model that it had"
    is_gone = verdict.kind is Kind.GONE
    if is_gone:
        text += ": save the remaining state (Checkpoints.save_survivors) and restart the job"
    error = ResizeError(f"{text}.")
    error.ranks = tuple(rank for rank in said if rank != NOBODY)
    error.is_gone, error.is_out_of_memory = is_gone, verdict.kind is Kind.OUT_OF_MEMORY
    return error


@dataclass(frozen=True)
class _Told:
    """What one rank says of itself; ``why`` it cannot take part, if so."""

    why: str = ""
    before: int | None = None
    after: int | None = None
    model: int = 0
    """A checksum of the names, shapes and dtypes that all must have alike."""
    state: int = 0
    """The same of the optimizers' state, for those that hold the model."""
    forms: tuple[OptimizerForm, ...] | None = None
    """Of the rank in the first place."""
    axes: tuple[str, ...] | None = None
    """Names of its mesh, of the same rank."""


class _Resize:
    """One call of :func:`resize` on one rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        group: dist.ProcessGroup | None,
        every: dist.ProcessGroup,
    ) -> None:
        self._model, self._optimizers, self._group, self._every = model, optimizers, group, every
        self._resizing: Resizing | None = None
        self._batches: list[list[Moving]] = []
        """What is exchanged together: a group's tensors; at last what holders have whole."""
        self._states: list[tuple[Optimizer, Tensor, dict[str, Any] | None]] = []
        self._moved: list[tuple[int, int]] = []

    # Before anything moves --------------------------------------------------------------------

    def prepare(self) -> None:
        """Learn what moves, and make room for it.

        Raises:
            PeerError: when another rank cannot take part.
            SettingError: when ranks do not fit together.
        """
        own, raised = _Told(), None
        try:
            own = self._look()
        except Exception as error:
            own, raised = _Told(why=f"{type(error).__name__}: {error}"), error
        told: list[Any] = [None] * dist.get_world_size(self._every)
        dist.all_gather_object(told, own, group=self._every)
        if raised is not None:
            raise raised
        self._compare(told)
        self._make()

    def _look(self) -> _Told:
        resizing = self._resizing = Resizing(self._model)
        groups = resizing.groups
        sharded = {id(p.parameter) for group in groups for p in group.shards.parameters}
        self._names = {id(p): name for name, p in self._model.named_parameters()}
        every = (*self._model.parameters(), *self._model.buffers())
        self._plain = [tensor for tensor in every if id(tensor) not in sharded]
        if any(isinstance(tensor, DTensor) for tensor in self._plain):
            raise UnsupportedError("resize() moves no ignored parameters that are DTensors.")
        check_optimizers(self._optimizers, self._names)
        empty = [group.shards.is_vacant for group in groups]
        if any(empty) and not all(empty):
            raise LifecycleError(
                "some sharded parameters are on the meta device, and others have values. Give all "
                "of them values, or none on a rank that joins."
            )
        mesh = groups[0].roles.mesh
        after = None if self._group is None else dist.get_rank(self._group)
        own = _Told(after=after, model=_checksum(self._lines()))
        if any(empty):
            return own
        place = cast("Sequence[int]", mesh.get_coordinate())[0]
        forms = tuple(OptimizerForm.of(o, self._names) for o in self._optimizers)
        own = replace(own, before=place, state=_checksum(w for f in forms for w in f.words()))
        return own if place else replace(own, forms=forms, axes=mesh.mesh_dim_names)

    def _lines(self) -> list[str]:
        assert self._resizing is not None
        lines = [
            f"{index} {self._names[id(p.parameter)]} {placed.shape} {p.dim} {g.shards.dtype}"
            for index, g in enumerate(self._resizing.groups)
            for p, placed in zip(g.shards.parameters, g.shards.layout.parameters, strict=True)
        ]
        lines += [f"{tuple(t.shape)} {t.dtype}" for t in self._plain]
        for optimizer in self._optimizers:
            lines.append(f"groups of {[len(group[PARAMS]) for group in optimizer.param_groups]}")
            lines += [self._names[id(p)] for p in parameters_of(optimizer)]
        return lines

    def _compare(self, told: Sequence[_Told]) -> None:
        failed = {rank: one.why for rank, one in enumerate(told) if one.why}
        if failed:
            raise PeerError("; ".join(f"rank {rank}: {why}" for rank, why in failed.items()))
        seats = self._seats = Seats(tuple(t.before for t in told), tuple(t.after for t in told))
        first = told[seats.holders[0]]
        models = [rank for rank, one in enumerate(told) if one.model != first.model]
        states = [r for r in seats.holders if told[r].state != first.state]
        for what, ranks in (("model or optimizers", models), ("optimizer state", states)):
            if ranks:
                raise SettingError(
                    f"ranks {ranks} of the process group have other {what} than rank "
                    f"{seats.holders[0]}: units, names, shapes, dtypes and parameter groups must "
                    "be the same."
                )
        assert first.forms is not None
        self._forms, self._axes = first.forms, first.axes

    def _make(self) -> None:
        assert self._resizing is not None
        device, mesh = self._resizing.groups[0].roles.device, None
        if self._group is not None:
            mesh = DeviceMesh.from_group(self._group, device.type, mesh_dim_names=self._axes)
        own = dist.get_rank(self._every)
        self._holds = self._seats.before[own] is not None
        self._exchange = Exchange(self._seats, self._every, device)
        self._notes: dict[str, None] = {}
        homes: dict[int, tuple[ShardedParameter, list[Moving]]] = {}
        for one in self._resizing.build(mesh):
            batch: list[Moving] = []
            pairs = zip(one.before.shards.parameters, one.after.shards.parameters, strict=True)
            for before, after in pairs:
                held = local_tensor(cast("DTensor", before.parameter))
                made = local_tensor(cast("DTensor", after.parameter))
                homes[id(before.parameter)] = after, batch
                batch.append(_rows(after, None if held.is_meta else held, made))
            self._batches.append(batch)
            self._notes.update(
                (f"{plugin}: what it kept for the old number of ranks was dropped", None)
                for plugin, _ in one.before.contributions.states
            )
        whole = [self._whole(tensor, tensor.dtype, tensor) for tensor in self._plain]
        for optimizer, form in zip(self._optimizers, self._forms, strict=True):
            for parameter, state in zip(parameters_of(optimizer), form.states, strict=True):
                heir, batch = homes.get(id(parameter), (None, whole))
                new = self._state(optimizer, parameter, state or {}, heir, batch)
                self._states.append((optimizer, parameter, new if state and self._group else None))
        self._batches.append(whole)

    def _state(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        state: State,
        after: ShardedParameter | None,
        batch: list[Moving],
    ) -> dict[str, Any]:
        """Room for the ``state`` of one parameter, which is sharded if it is ``after``."""
        held = optimizer.state[parameter] if self._holds and state else {}
        new: dict[str, Any] = {}
        for name, form in state.items():
            if not isinstance(form, Like):
                new[name] = held[name] if held else value_of(form, self._exchange.device)
            elif after is None:
                moving = self._whole(parameter, form.dtype, held.get(name))
                new[name] = moving.made
                batch.append(moving)
            else:
                like = local_tensor(cast("DTensor", after.parameter))
                made = torch.empty(like.shape, dtype=form.dtype, device=like.device)
                new[name] = after.wrap(made)
                batch.append(_rows(after, local_tensor(held[name]) if held else None, made))
        return new

    def _whole(self, like: Tensor, dtype: torch.dtype, held: Tensor | None) -> Moving:
        """Of a tensor that every holder has whole: a rank that joins gets memory for it."""
        held = held if self._holds else None
        made = None if self._group is None else held
        if self._group is not None and made is None:
            where = self._exchange.device if like.is_meta else like.device
            made = torch.empty(like.shape, dtype=dtype, device=where)
        return Moving(tuple(like.shape), dtype, None, held, made)

    # Moving -----------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Fill what was made."""
        for batch in self._batches:
            self._moved.append(self._exchange.move(batch))

    def undo(self) -> None:
        """Let go of what was made."""
        if self._resizing is not None:
            self._resizing.undo()
        go_on()  # process groups are repaired in the epoch after a failure

    def commit(self) -> Resized:
        """Let go of what was before."""
        assert self._resizing is not None
        self._resizing.commit()
        for tensor, moving in zip(self._plain, self._batches[-1], strict=False):
            if moving.held is None and moving.made is not None:
                move(tensor, moving.made)
        for optimizer, parameter, state in self._states:
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = state
        if not self._holds and self._group is not None:
            for optimizer, form in zip(self._optimizers, self._forms, strict=True):
                for group, settings in zip(optimizer.param_groups, form.settings, strict=True):
                    group.update(copy.deepcopy(dict(settings)))
        self._tell_who_holds()
        sent, received = (sum(moved) for moved in zip(*self._moved, strict=True))
        return Resized(sent, received, tuple(self._notes))

    def _tell_who_holds(self) -> None:
        """Ranks that hold nothing now may end when they like."""
        ranks = dict(enumerate(dist.get_process_group_ranks(self._every)))
        away = {ranks[one] for one, place in enumerate(self._seats.after) if place is None}
        alarm = current_alarm()
        alarm.away = alarm.away.difference(ranks.values()) | away


def _rows(parameter: ShardedParameter, held: Tensor | None, made: Tensor) -> Moving:
    """Of a tensor with the form of ``parameter``; on the meta device there is nothing."""
    shape = tuple(parameter.spec.shape)
    return Moving(shape, made.dtype, parameter.dim, held, None if made.is_meta else made)


def _checksum(lines: Iterable[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())
