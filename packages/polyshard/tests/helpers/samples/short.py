"""Codecs in one class each, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyshard import GatherCodecPlugin, ReduceCodecPlugin, hookimpl
from polyshard.plugins.seams import GroupInfo
from samples.verdict import Right, Samples, Wrong, variant


class Exact(GatherCodecPlugin):
    """Ships every chunk in one dtype."""

    name = "sample"
    dtype: ClassVar[torch.dtype] = torch.float32

    def payload_size(self) -> int | None:
        return self.dtype.itemsize * sum(p.chunk_numel for p in self.layout.parameters)

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        placed = self.layout.parameters
        parts = [shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in placed]
        payload.copy_(torch.cat(parts).to(self.dtype).view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.clone().view(self.dtype)
        parts = values.split([p.chunk_numel for p in self.layout.parameters], dim=1)
        for region, part in zip(regions, parts, strict=True):
            region.copy_(part)


class Lossy(Exact):
    dtype = torch.bfloat16


class WholeShard(GatherCodecPlugin):
    """As the tutorial has it: the shard as it is, padding and all."""

    name = "sample"

    def payload_size(self) -> int | None:
        return 2 * self.layout.shard_numel

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(shard)

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.view(torch.bfloat16)
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(values.narrow(1, placed.shard_offset, placed.chunk_numel))


class NotAlone(Exact):
    """Leaves single ranks to the engine."""

    def payload_size(self) -> int | None:
        return super().payload_size() if self.group.world_size > 1 else None


class Nobody(Exact):
    """Serves no group."""

    def serves(self, group: GroupInfo) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class Chosen(Exact):
    """Its settings are fields; each group has a scratch of its own."""

    scale: float = 2.0

    def setup(self) -> None:
        self.scratch = torch.zeros(sum(p.chunk_numel for p in self.layout.parameters))

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        scratch = payload.clone()
        super().encode(shard * self.scale, scratch)
        self.scratch.copy_(scratch.view(torch.float32))
        payload.copy_(self.scratch.view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        for region in regions:
            region.div_(self.scale)


class ExactSums(ReduceCodecPlugin):
    """Ships every chunk in one dtype, and sums in rank order."""

    name = "sample"
    dtype: ClassVar[torch.dtype] = torch.float32

    def payload_size(self) -> int | None:
        return self.dtype.itemsize * sum(p.chunk_numel for p in self.layout.parameters)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        payloads.copy_(torch.cat(list(chunks), dim=1).to(self.dtype).view(torch.uint8))

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        values = payloads.clone().view(self.dtype)
        for out, part in zip(outs, values.split([o.numel() for o in outs], dim=1), strict=True):
            total = part[0].float()
            for row in part[1:]:
                total = total + row.float()
            out.copy_(total)


class Feedback(ExactSums):
    """Sends the larger half of each row; what was left out is added to the next reduction."""

    def setup(self) -> None:
        numel = sum(p.chunk_numel for p in self.layout.parameters)
        self.left = torch.zeros(self.layout.world_size, numel)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        values = torch.cat(list(chunks), dim=1).float() + self.left
        middle = values.abs().median(dim=1, keepdim=True).values
        sent = torch.where(values.abs() >= middle, values, 0.0)
        self.left.copy_(values - sent)
        super().encode([sent], payloads)


class SavedFeedback(Feedback):
    """Its errors are part of training."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.left.copy_(state_dict["value"])


# Wrong -------------------------------------------------------------------------------------------


class Growing(Exact):
    """Its payload grows with the rank."""

    def payload_size(self) -> int | None:
        return (super().payload_size() or 0) + 4 * self.group.rank


class Choosy(Exact):
    """Serves the first rank only."""

    def serves(self, group: GroupInfo) -> bool:
        return group.rank == 0


class PeersOnly(Exact):
    """Leaves the first row alone."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads[1:], [region[1:] for region in regions])


class Shared(Exact):
    """Keeps what it sends in one place for all groups, instead of in itself."""

    last: ClassVar[dict[int, Tensor]] = {}

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload)
        self.last[self.group.rank] = payload.clone()

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        payloads = payloads.clone()
        payloads[self.group.rank] = self.last[self.group.rank]
        super().decode(payloads, regions)


class SharedSums(Feedback):
    """Adds what it left out of one group to the next one."""

    of_all: ClassVar[dict[int, Tensor]] = {}

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        values = torch.cat(list(chunks), dim=1)
        known = self.of_all.get(self.group.rank)
        self.of_all[self.group.rank] = values
        if known is not None and known.shape == values.shape:
            values = values + 100 * known
        ExactSums.encode(self, [values], payloads)


class Averaging(ExactSums):
    """Averages, which is the engine's part."""

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        super().decode_sum(payloads, outs)
        for out in outs:
            out.div_(len(payloads))


class ForgettingState(SavedFeedback):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is loaded."""


class LateState(SavedFeedback):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if bool(self.left.any()) else {}


class AliasingState(SavedFeedback):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.left = state_dict["value"]


class ClosesAll(Lossy):
    """Lets go of what all groups need when one goes."""

    def __init__(self) -> None:
        self.tables = [1.0]

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        for region in regions:
            region.mul_(sum(self.tables))

    @hookimpl
    def polyshard_teardown(self, group: GroupInfo) -> None:
        self.tables.clear()


SAMPLES = Samples(
    right=[
        Right(Exact),
        Right(Lossy, tolerance=2.0**-8),
        Right(NotAlone),
        Right(Nobody),
        Right(Chosen),
        Right(ExactSums),
        Right(SavedFeedback, tolerance=1.0, loss_tolerance=0.2),
        Right(WholeShard, tolerance=2.0**-8),
    ],
    wrong=[
        Wrong(Growing, "test_answers_are_the_same_on_every_rank"),
        Wrong(Choosy, "test_answers_are_the_same_on_every_rank"),
        Wrong(variant(Exact, "WrongDtype", dtype=torch.bfloat16), "test_gather_round_trip"),
        Wrong(PeersOnly, "test_gather_round_trip"),
        Wrong(Shared, "test_gathers_of_two_groups_do_not_mix"),
        Wrong(SharedSums, "test_reductions_of_two_groups_do_not_mix"),
        Wrong(Averaging, "test_reduce_sums_over_ranks"),
        Wrong(Feedback, "test_a_resumed_run_is_the_uninterrupted_one", tolerance=1.0),
        Wrong(ForgettingState, "test_plugin_state_round_trip", tolerance=1.0),
        Wrong(LateState, "test_plugin_state_round_trip", tolerance=1.0),
        Wrong(AliasingState, "test_plugin_state_round_trip", tolerance=1.0),
        Wrong(ClosesAll, "test_one_of_two_models_is_closed"),
    ],
)
