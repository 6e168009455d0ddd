"""Gather codecs, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import BoundGatherCodec, GatherCodec, GroupInfo
from polyshard.sharding.layout import GroupLayout
from samples.verdict import Right, Samples, Wrong, variant


class Cast(BoundGatherCodec):
    """Ships every chunk in one dtype."""

    dtype = torch.float32

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.group = group
        self.layout = layout
        numel = sum(p.chunk_numel for p in layout.parameters)
        self.payload_bytes = self.dtype.itemsize * numel

    def values(self, shard: Tensor) -> Tensor:
        placed = self.layout.parameters
        return torch.cat([shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in placed])

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.copy_(self.values(shard).to(self.dtype).view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.clone().view(self.dtype)
        for region, part in zip(regions, self.parts(values), strict=True):
            region.copy_(part)

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        return torch.split(values, [p.chunk_numel for p in self.layout.parameters], dim=1)


class Half(Cast):
    dtype = torch.bfloat16


class PluginCodec(GatherCodec):
    """Binds what its plugin is about; ``alone`` leaves single ranks to the engine."""

    name = "sample"

    def __init__(self, bound: Any, alone: bool = True) -> None:
        self.bound = bound
        self.alone = alone

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        if self.bound is None or (group.world_size == 1 and not self.alone):
            return None
        made: BoundGatherCodec = self.bound(group, layout)
        return made


class Exact(Plugin):
    """Bits as they are."""

    name = "sample"
    bound: ClassVar[Any] = Cast
    alone: ClassVar[bool] = True

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherCodec | None:
        return PluginCodec(self.bound, self.alone)


class Lossy(Exact):
    bound = Half


class _Wide(PluginCodec):
    """Leaves to the engine what travels in two bytes anyway."""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        wide = group.param_dtype.itemsize > 2
        return super().bind(group, layout) if wide else None


class NotNarrow(Lossy):
    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherCodec | None:
        return _Wide(self.bound)


class NoneBound(Exact):
    """Leaves every group to the engine, when it is bound."""

    bound = None


class NotAlone(Exact):
    """Leaves single ranks to the engine."""

    alone = False


class Around(Cast):
    """Counts what another codec does."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.inner = Half(group, layout)
        self.payload_bytes = self.inner.payload_bytes
        self.calls = 0

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self.calls += 1
        self.inner.encode(shard, payload)

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        self.inner.decode(payloads, regions)


# Wrong -------------------------------------------------------------------------------------------


class _Growing(Cast):
    """Its payload grows with the rank."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(group, layout)
        self.payload_bytes += 4 * group.rank


class _PeersOnly(Cast):
    """Leaves the first row alone, as if the owner knew better."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads[1:], [region[1:] for region in regions])


class _Copying(Cast):
    """Fills copies of strided regions."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, [region.contiguous() for region in regions])


class _Spending(Cast):
    """Leaves the shard as zeros."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        shard.zero_()


class _Scaled(Cast):
    """Scales by the largest value, be it padding."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard / shard.abs().max() * shard.abs().max(), payload)


class _Noisy(Cast):
    """Adds noise of its own."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard + 1e-4 * torch.randn_like(shard), payload)


class _Shared(Cast):
    """Keeps what it sends in one place for all groups."""

    last: ClassVar[dict[int, Tensor]] = {}

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        self.last[self.group.rank] = payload.clone()

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        payloads = payloads.clone()
        payloads[self.group.rank] = self.last[self.group.rank]
        super().decode(payloads, regions)


class _OwnExact(Half):
    """Leaves a rank's own chunk as it is, while its peers get it rounded."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        self.own = self.values(shard).clone()

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        rank = self.group.rank
        for region, part in zip(regions, self.parts(self.own.view(1, -1)), strict=True):
            region[rank].copy_(part[0])


class _RankOff(Half):
    """Gives the second rank other values, within the tolerance."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        if self.group.rank == 1:
            for region in regions:
                region.mul_(1 + 2.0**-20)


class _Leaking(Half):
    """Keeps what it decodes in every step."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(group, layout)
        self.seen: list[Tensor] = []

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        self.seen.append(payloads[:, :64].clone())


class _Keeping(Half):
    """Keeps all unsharded parameters."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        self.last = [region.clone() for region in regions]


class _Truncating(Cast):
    """Cuts bits off instead of rounding: every weight loses a little."""

    dtype = torch.bfloat16

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        bits = self.values(shard).view(torch.int32) & -(1 << 16)
        payload.copy_(bits.view(torch.float32).to(self.dtype).view(torch.uint8))


SAMPLES = Samples(
    right=[
        Right(Exact),
        Right(Lossy, tolerance=2.0**-8),
        Right(NoneBound),
        Right(NotAlone),
        Right(NotNarrow, tolerance=2.0**-8),
        Right(variant(Exact, "Wrapping", bound=Around), tolerance=2.0**-8),
    ],
    wrong=[
        Wrong(variant(Exact, "Growing", bound=_Growing), "test_answers_are_the_same_on_every_rank"),
        Wrong(variant(Exact, "PeersOnly", bound=_PeersOnly), "test_gather_round_trip"),
        Wrong(variant(Exact, "Copying", bound=_Copying), "test_gather_round_trip"),
        Wrong(variant(Exact, "WrongDtype", bound=Half), "test_gather_round_trip"),
        Wrong(variant(Exact, "Spending", bound=_Spending), "test_gather_round_trip"),
        Wrong(
            variant(Exact, "Scaled", bound=_Scaled), "test_gather_ignores_padding", tolerance=1e-3
        ),
        Wrong(
            variant(Exact, "Noisy", bound=_Noisy), "test_gather_is_deterministic", tolerance=1e-3
        ),
        Wrong(
            variant(Exact, "OwnExact", bound=_OwnExact),
            "test_ranks_compute_with_the_same_values",
            tolerance=2.0**-8,
        ),
        Wrong(
            variant(Exact, "RankOff", bound=_RankOff),
            "test_ranks_compute_with_the_same_values",
            tolerance=2.0**-8,
        ),
        Wrong(
            variant(Exact, "Leaking", bound=_Leaking), "test_memory_is_released", tolerance=2.0**-8
        ),
        Wrong(
            variant(Exact, "Keeping", bound=_Keeping), "test_memory_is_released", tolerance=2.0**-8
        ),
        Wrong(
            variant(Exact, "Truncating", bound=_Truncating),
            "test_gather_errors_are_no_bias",
            tolerance=2.0**-7,
        ),
        Wrong(variant(Exact, "Shared", bound=_Shared), "test_gathers_of_two_groups_do_not_mix"),
    ],
)
