"""Reduce codecs, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from samples.verdict import Right, Samples, Wrong, variant


class Cast(BoundReduceCodec):
    """Ships every chunk in one dtype, and sums in rank order."""

    dtype = torch.float32

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.group = group
        self.layout = layout
        numel = sum(p.chunk_numel for p in layout.parameters)
        self.payload_bytes = self.dtype.itemsize * numel

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        values = torch.cat(list(chunks), dim=1).to(self.dtype)
        payloads.copy_(values.view(torch.uint8))

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        values = payloads.clone().view(self.dtype)
        parts = values.split([out.numel() for out in outs], dim=1)
        for out, part in zip(outs, parts, strict=True):
            total = part[0].float()
            for row in part[1:]:
                total = total + row.float()
            out.copy_(total)


class Half(Cast):
    dtype = torch.bfloat16


class TopHalf(Cast):
    """Sends the larger half of each row; what was left out is added to the next reduction."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(group, layout)
        self.left = torch.zeros(())

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        values = torch.cat(list(chunks), dim=1).float() + self.left
        middle = values.abs().median(dim=1, keepdim=True).values
        sent = torch.where(values.abs() >= middle, values, 0.0)
        self.left = values - sent
        super().encode([sent], payloads)


class Told(Cast):
    """Sends nothing of what has no gradient, as it was told when the reduction began."""

    def begin(self, present: frozenset[int]) -> None:
        self.present = present

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        own = [c if i in self.present else c.new_zeros(c.shape) for i, c in enumerate(chunks)]
        super().encode(own, payloads)


class PluginCodec(ReduceCodec):
    """Binds what its plugin is about."""

    name = "sample"

    def __init__(self, bound: Any) -> None:
        self.bound = bound

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        made: BoundReduceCodec | None = self.bound(group, layout) if self.bound else None
        return made


class Exact(Plugin):
    """Bits as they are."""

    name = "sample"
    bound: ClassVar[Any] = Cast

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec | None:
        return PluginCodec(self.bound)


class Lossy(Exact):
    bound = Half


class _Wide(PluginCodec):
    """Leaves to the engine what is reduced in two bytes anyway."""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        return super().bind(group, layout) if group.reduce_dtype.itemsize > 2 else None


class NotNarrow(Lossy):
    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec | None:
        return _Wide(self.bound)


class Around(Cast):
    """Counts what another codec does."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.inner = Half(group, layout)
        self.payload_bytes = self.inner.payload_bytes
        self.calls = 0

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        self.calls += 1
        self.inner.encode(chunks, payloads)

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        self.inner.decode_sum(payloads, outs)


# Wrong -------------------------------------------------------------------------------------------


class _Growing(Cast):
    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(group, layout)
        self.payload_bytes += 4 * group.rank


class _LastWins(Cast):
    """Keeps one rank's gradient instead of the sum."""

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        super().decode_sum(payloads[-1:], outs)


class _Averaging(Cast):
    """Averages, which is the engine's part."""

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        super().decode_sum(payloads, outs)
        for out in outs:
            out.div_(len(payloads))


class _Spending(Cast):
    """Clears the gradients that it was shown."""

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        super().encode(chunks, payloads)
        for chunk in chunks:
            chunk.zero_()


class _Misdirected(Cast):
    """Sends every peer what belongs to another."""

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        super().encode([chunk.flip(0) for chunk in chunks], payloads)


class _Shared(TopHalf):
    """Keeps what it left out in one place for all groups."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        values = torch.cat(list(chunks), dim=1)
        known = self.kept.get(self.group.rank)
        self.kept[self.group.rank] = values
        if known is not None and known.shape == values.shape:
            values = values + 100 * known
        Cast.encode(self, [values], payloads)


class _Dropping(TopHalf):
    """Sends the larger half of each row, and forgets the rest."""

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        super().encode(chunks, payloads)
        self.left = torch.zeros(())


SAMPLES = Samples(
    right=[
        Right(Exact),
        Right(Lossy, tolerance=2.0**-8),
        Right(variant(Exact, "Begun", bound=Told)),
        Right(NotNarrow, tolerance=2.0**-8),
        Right(variant(Exact, "NoneBound", bound=None)),
        Right(variant(Exact, "Wrapping", bound=Around), tolerance=2.0**-8),
    ],
    wrong=[
        Wrong(variant(Exact, "Growing", bound=_Growing), "test_answers_are_the_same_on_every_rank"),
        Wrong(variant(Exact, "LastWins", bound=_LastWins), "test_reduce_sums_over_ranks"),
        Wrong(variant(Exact, "Averaging", bound=_Averaging), "test_reduce_sums_over_ranks"),
        Wrong(variant(Exact, "WrongDtype", bound=Half), "test_reduce_sums_over_ranks"),
        Wrong(variant(Exact, "Spending", bound=_Spending), "test_reduce_sums_over_ranks"),
        Wrong(variant(Exact, "Misdirected", bound=_Misdirected), "test_reduce_sums_over_ranks"),
        Wrong(
            variant(Exact, "Feedback", bound=TopHalf),  # which no checkpoint holds
            "test_a_resumed_run_is_the_uninterrupted_one",
            tolerance=1.0,
        ),
        Wrong(
            variant(Exact, "Dropping", bound=_Dropping), "test_sums_are_not_biased", tolerance=1.0
        ),
        Wrong(variant(Exact, "Shared", bound=_Shared), "test_reductions_of_two_groups_do_not_mix"),
    ],
)
