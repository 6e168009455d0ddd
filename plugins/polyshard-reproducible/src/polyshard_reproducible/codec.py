"""Reductions over the tree: what travels, and when a sum is given to the engine.

[Note: one sum a step]
Every turn is reduced, so nothing unsharded waits. What a turn sums joins the others of the step in
a tree of sharded sums, and the engine, which adds each turn to ``.grad``, is given nothing until
the last turn: then the whole sum. It is divided once, by the number of slots, a power of two. See
also [Note: the tree] in tree.py.

What is refused is refused in :meth:`BoundTreeReduce.keep`, once ranks have compared which gradients
they have: then it is refused on all of them. Before, a rank that raised would leave the others in
their messages.

Where the transport can sum over a tree itself, gradients travel from where autograd wrote them in
their own dtype. Elsewhere they are packed, and summed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.plugins.seams import BoundReduceCodec, BoundReplicaCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard_reproducible.clock import Clock, Moment
from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.tree import TreeSum, sum_rows

DTYPE = torch.float32
"""Of all sums."""


class TreeReduce(ReduceCodec):
    """Sums the gradients of one group over the tree of slots."""

    name = "tree"

    def __init__(self, slots: int, clock: Clock) -> None:
        """``clock`` says which turn is reduced."""
        self.bound: BoundTreeReduce | None = None
        self._slots = slots
        self._clock = clock

    @property
    def settings(self) -> str:
        """How many leaves the tree has."""
        return f"slots={self._slots}"

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundTreeReduce:
        self.bound = BoundTreeReduce(group, layout, self._slots, self._clock)
        return self.bound


class BoundTreeReduce(BoundReduceCodec):
    """The reductions of one group. See [Note: one sum a step]."""

    sums_in_tree = True

    def __init__(self, group: GroupInfo, layout: GroupLayout, slots: int, clock: Clock) -> None:
        """``slots`` are those of a step, over all ranks."""
        ends = list(itertools.accumulate(p.chunk_numel for p in layout.parameters))
        self._spans = [slice(a, b) for a, b in itertools.pairwise([0, *ends])]
        self.payload_bytes = ends[-1] * DTYPE.itemsize if ends else 0
        self.divisor = float(slots)
        held = (slots // group.mesh.size()).bit_length() - 1  # of so many turns, a power of two
        self.kept_bytes = held * layout.shard_numel * DTYPE.itemsize
        self.replicas = ReplicaTree(layout.shard_numel)
        self._names = [p.fqn for p in group.parameters]
        self._clock = clock
        self._tree = TreeSum()
        self._seen: Moment | None = None
        self._present: frozenset[int] = frozenset()
        self._begun: tuple[Moment | None, frozenset[int]] = (None, self._present)

    @override
    def begin(self, present: frozenset[int]) -> None:
        self._begun = (self._clock.now, present)

    def _see(self) -> Moment:
        """The turn whose sum has come, if it is the next of its step."""
        now, present = self._begun
        if now is None:
            raise ReproducibleError(
                f"reproducible: gradients of {self._names} are reduced outside of a slot. Run "
                "forward and backward in `for slot in reproducible.each_slot(model, step=...)`."
            )
        if self._seen is now:
            raise ReproducibleError(
                f"reproducible: gradients of {self._names} are reduced twice in one slot. A slot "
                "is one forward and one backward: sum the losses before it."
            )
        if now.is_first:
            self._tree.clear()
        else:
            self._check(present, now)
        self._seen, self._present = now, present
        return now

    def _check(self, present: frozenset[int], now: Moment) -> None:
        """Refuse gradients that not every slot has: their sums would never be whole."""
        before = self._seen
        missed = before is None or (before.run, before.turn + 1) != (now.run, now.turn)
        differ = set(range(len(self._names))) if missed else present ^ self._present
        if differ:
            raise self._incomplete([self._names[i] for i in sorted(differ)])

    def check_ended(self, last: Moment) -> None:
        """Refuse a step in which some slots had gradients of this group, and others had not."""
        seen = self._seen
        if seen is not None and seen.run is last.run and not seen.is_last:
            raise self._incomplete(self._names)

    @staticmethod
    def _incomplete(names: Sequence[str]) -> ReproducibleError:
        return ReproducibleError(
            f"reproducible: {list(names)} have gradients in some slots of a step and none in "
            "others, which depends on the data of ranks. Use them in every slot, or freeze them, "
            "or call set_reduce_scatter_unused_params(True) and use each unit in every slot."
        )

    @override
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        rows = payloads.view(DTYPE)
        for chunk, span in zip(chunks, self._spans, strict=True):
            rows[:, span].copy_(chunk)

    @override
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        summed = sum_rows(payloads.view(DTYPE))
        torch._foreach_copy_(list(outs), [summed[span] for span in self._spans])

    @override
    def keep(self, total: Tensor) -> Tensor | None:
        now = self._see()
        if now.turns > 1:
            self._tree.add(total)
            if not now.is_last:
                return None
            total = self._tree.take()
        if now.shares is not None:
            now.shares.sum_(total)
        return total


class ReplicaTree(BoundReplicaCodec):
    """The tree continues over replicas."""

    def __init__(self, numel: int) -> None:
        """``numel`` elements of a shard."""
        self.payload_bytes = numel * DTYPE.itemsize

    @override
    def encode(self, total: Tensor, payload: Tensor) -> None:
        payload.view(DTYPE).copy_(total)

    @override
    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        total.copy_(sum_rows(payloads.view(DTYPE)))
