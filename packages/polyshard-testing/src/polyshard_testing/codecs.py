"""Conformance of gather and reduce codecs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyshard.group.dtypes import Dtypes
from polyshard.plugins.contributions import GATHER_CODEC, REDUCE_CODEC
from polyshard.plugins.seams import GatherCodec, ReduceCodec
from polyshard.plugins.stack import PluginStack
from polyshard_testing.cases import MIXED, Case, case, cases, chunk_rows, real_mask, strided_rows
from polyshard_testing.runs import Kit


class Bias:
    """The mean error of a codec over many steps, along the sign of what it was given.

    The first half of the steps is left out: feedback of errors needs some to settle.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._errors: list[Tensor] = []

    def add(self, step: int, found: Tensor, expected: Tensor) -> None:
        """One parameter in one step."""
        if step >= self._kit.bias_steps:
            self._errors.append(((found - expected) * expected.sign()).double().flatten())

    def check(self) -> None:
        """Refuse a mean that chance does not explain, and that matters beside single errors."""
        errors = torch.cat(self._errors)
        mean, spread = errors.mean().abs(), errors.square().mean().sqrt()
        chance = errors.std() / math.sqrt(errors.numel())
        assert bool(mean <= max(6 * chance, BIAS_SHARE * spread)), (
            f"biased: after {self._kit.bias_steps} steps their mean is {float(mean):.1e}, "
            f"{float(mean / chance):.0f} times its standard error ({float(chance):.1e})"
        )


BIAS_SHARE = 0.25
"""How much of its root mean square the mean of an error may be: rounding to a few values is a
little biased where values near zero are more frequent."""


class CodecConformance(Kit):
    """Tests of what travels; skipped where the plugin takes no codec."""

    # Gather codec -----------------------------------------------------------------------------

    def _skip_without_gather_codec(self, stack: PluginStack) -> None:
        codec = self.contributions(stack, case(2, 0))[GATHER_CODEC]
        self._skip_unless_bound(codec, "gather codec")

    def _skip_without_reduce_codec(self, stack: PluginStack) -> None:
        codec = self.contributions(stack, case(2, 0))[REDUCE_CODEC]
        self._skip_unless_bound(codec, "reduce codec")

    def _skip_unless_bound(self, codec: GatherCodec | ReduceCodec, what: str) -> None:
        """Nothing to test where a codec is not claimed, or leaves the standard group alone."""
        self.skip_unless_claimed(codec, what)
        self.skip_unless_claimed(codec.bind(*case(2, 0).group), f"{what} for this group")

    def test_gather_round_trip(self, stack: PluginStack) -> None:
        """Every rank decodes every value, its own included, into strided memory."""
        self._skip_without_gather_codec(stack)
        for members in cases():
            if self.contributions(stack, members[0])[GATHER_CODEC].bind(*members[0].group) is None:
                continue
            values = members[0].values()
            payloads = torch.stack([self._payload(stack, at, values) for at in members])
            for at in members:
                codec = self._gather_codec(stack, at)
                regions = [strided_rows(len(members), p.chunk_numel) for p in at.layout.parameters]
                codec.decode(payloads, regions)
                self._check_regions(at, regions, values)

    def _gather_codec(self, stack: PluginStack, at: Case) -> Any:
        codec = self.contributions(stack, at)[GATHER_CODEC].bind(*at.group)
        assert codec is not None
        return codec

    def _payload(
        self, stack: PluginStack, at: Case, values: list[Tensor], padding: float = 0.0
    ) -> Tensor:
        codec = self._gather_codec(stack, at)
        payload = torch.full((codec.payload_bytes,), 0xAB, dtype=torch.uint8, device="cpu")
        shard = at.shard(values, padding)
        given = shard.clone()
        codec.encode(shard, payload)
        assert torch.equal(shard.view(torch.uint8), given.view(torch.uint8)), "encode changed it"
        return payload

    def _check_regions(self, at: Case, regions: list[Tensor], values: list[Tensor]) -> None:
        for placed, region, value in zip(at.layout.parameters, regions, values, strict=True):
            real = real_mask(placed)
            self.assert_close(region[real], chunk_rows(value, placed)[real])

    def test_gather_is_deterministic(self, stack: PluginStack) -> None:
        """The same shard gives the same payload."""
        self._skip_without_gather_codec(stack)
        at = case(3, 1)
        first, second = (self._payload(stack, at, at.values()) for _ in range(2))
        assert torch.equal(first, second)

    def test_gathers_of_two_groups_do_not_mix(self, stack: PluginStack) -> None:
        """What one group encodes and decodes does not reach another of the same plugin."""
        self._skip_without_gather_codec(stack)
        at = case(2, 0)
        large, small = at.values(), [0.01 * value for value in at.values(seed=1)]
        alone = self._payload(stack, at, large)
        first, second = (self._gather_codec(stack, at) for _ in range(2))
        payloads = torch.full((2, 2, first.payload_bytes), 0xAB, dtype=torch.uint8, device="cpu")
        for codec, values, rows in ((first, large, payloads[0]), (second, small, payloads[1])):
            for rank, payload in enumerate(rows):
                codec.encode(case(2, rank).shard(values), payload)
        assert torch.equal(payloads[0, 0], alone)
        for codec, values, rows in ((first, large, payloads[0]), (second, small, payloads[1])):
            regions = [strided_rows(2, p.chunk_numel) for p in at.layout.parameters]
            codec.decode(rows, regions)
            self._check_regions(at, regions, values)

    def test_gather_ignores_padding(self, stack: PluginStack) -> None:
        """What padding holds does not reach a value."""
        self._skip_without_gather_codec(stack)
        members = [case(3, rank) for rank in range(3)]
        values = members[0].values()
        payloads = torch.stack(
            [self._payload(stack, at, values, padding=float("nan")) for at in members]
        )
        regions = [strided_rows(3, p.chunk_numel) for p in members[0].layout.parameters]
        self._gather_codec(stack, members[0]).decode(payloads, regions)
        self._check_regions(members[0], regions, values)

    def test_gather_errors_are_no_bias(self, stack: PluginStack) -> None:
        """Over many steps, errors within the tolerance go up as often as down.

        Weights that always lose a little, as by cutting off bits, drift away from those without
        the codec, though each error is small.
        """
        self._skip_without_gather_codec(stack)
        members = [case(2, rank) for rank in range(2)]
        codecs = [self._gather_codec(stack, at) for at in members]
        size = codecs[0].payload_bytes
        bias = Bias(self)
        for step in range(2 * self.bias_steps):
            values = members[0].values(seed=step)
            payloads = torch.empty(2, size, dtype=torch.uint8, device="cpu")
            for codec, at, payload in zip(codecs, members, payloads, strict=True):
                codec.encode(at.shard(values), payload)
            regions = [strided_rows(2, p.chunk_numel) for p in members[0].layout.parameters]
            codecs[0].decode(payloads, regions)
            for placed, region, value in zip(
                members[0].layout.parameters, regions, values, strict=True
            ):
                real = real_mask(placed)
                bias.add(step, region[real], chunk_rows(value, placed)[real])
        bias.check()

    @pytest.mark.parametrize("dtypes", MIXED, ids=str)
    def test_gather_with_mixed_precision(self, stack: PluginStack, dtypes: Dtypes) -> None:
        """Shards come in the original dtype, regions are in the parameter dtype."""
        self._skip_without_gather_codec(stack)
        members = [case(3, rank, dtypes) for rank in range(3)]
        bound = self.contributions(stack, members[0])[GATHER_CODEC].bind(*members[0].group)
        self.skip_unless_claimed(bound, "gather codec for these dtypes")
        values = members[0].values()
        payloads = torch.stack([self._payload(stack, at, values) for at in members])
        placed = members[0].layout.parameters
        regions = [strided_rows(3, p.chunk_numel, dtypes.param) for p in placed]
        self._gather_codec(stack, members[0]).decode(payloads, regions)
        for slot, region, value in zip(placed, regions, values, strict=True):
            real = real_mask(slot)
            expected = chunk_rows(value, slot).to(dtypes.param)[real].float()
            slack = self.tolerance + (torch.finfo(dtypes.param).eps if self.tolerance else 0.0)
            if expected.numel():
                error = (region[real].float() - expected).abs().max()
                assert bool(error <= slack * expected.abs().max()), float(error)

    # Reduce codec -----------------------------------------------------------------------------

    @pytest.mark.parametrize("dtypes", MIXED, ids=str)
    def test_reduce_with_mixed_precision(self, stack: PluginStack, dtypes: Dtypes) -> None:
        """Chunks come in the reduce dtype, and sums go out in it."""
        self._skip_without_reduce_codec(stack)
        members = [case(3, rank, dtypes) for rank in range(3)]
        bound = self.contributions(stack, members[0])[REDUCE_CODEC].bind(*members[0].group)
        self.skip_unless_claimed(bound, "reduce codec for these dtypes")
        sent = [self._sent(stack, at) for at in members]
        at = members[1]
        outs = [
            torch.zeros(p.chunk_numel, dtype=dtypes.reduce, device="cpu")
            for p in at.layout.parameters
        ]
        self._reduce_codec(stack, at).decode_sum(torch.stack([s[1] for s in sent]), outs)
        for index, placed in enumerate(at.layout.parameters):
            rows = [chunk_rows(at.values(seed=r)[index], placed)[1] for r in range(3)]
            expected = torch.stack([row.to(dtypes.reduce) for row in rows]).float().sum(0)
            real = real_mask(placed)[1]
            slack = 12 * (self.tolerance + torch.finfo(dtypes.reduce).eps)
            found = outs[index][real].float()
            torch.testing.assert_close(found, expected[real], rtol=0, atol=slack)

    def test_reduce_sums_over_ranks(self, stack: PluginStack) -> None:
        """Chunk ``r`` of all ranks ends up summed on rank ``r``."""
        self._skip_without_reduce_codec(stack)
        for members in cases():
            if self.contributions(stack, members[0])[REDUCE_CODEC].bind(*members[0].group) is None:
                continue
            sent = [self._sent(stack, at) for at in members]
            for at in members:
                codec = self._reduce_codec(stack, at)
                outs = [
                    torch.full((p.chunk_numel,), float("nan"), device="cpu")
                    for p in at.layout.parameters
                ]
                codec.decode_sum(torch.stack([s[at.rank] for s in sent]), outs)
                self._check_sums(at, outs, len(members))

    def test_sums_are_not_biased(self, stack: PluginStack) -> None:
        """Over many steps, what a sum lacks is made up for, or was too much as often."""
        self._skip_without_reduce_codec(stack)
        members = [case(2, rank) for rank in range(2)]
        codecs = [self._reduce_codec(stack, at) for at in members]
        bias, at = Bias(self), members[0]
        for step in range(2 * self.bias_steps):
            drawn = [
                # Gradients that point the same way in all steps, as those do that matter.
                [a + 0.3 * b for a, b in zip(m.values(m.rank), m.values(100 + step), strict=True)]
                for m in members
            ]
            pairs = list(zip(codecs, members, drawn, strict=True))
            sent = torch.stack([self._sent_by(c, m, values)[0] for c, m, values in pairs])
            outs = [torch.zeros(p.chunk_numel, device="cpu") for p in at.layout.parameters]
            codecs[0].decode_sum(sent, outs)
            for index, placed in enumerate(at.layout.parameters):
                real = real_mask(placed)[0]
                rows = [chunk_rows(values[index], placed)[0] for values in drawn]
                bias.add(step, outs[index][real], torch.stack(rows).sum(0)[real])
        bias.check()

    def test_reductions_of_two_groups_do_not_mix(self, stack: PluginStack) -> None:
        """What one group sends does not reach another of the same plugin."""
        self._skip_without_reduce_codec(stack)
        members = [case(2, rank) for rank in range(2)]
        pairs = [[self._reduce_codec(stack, at) for at in members] for _ in range(2)]
        sent = [
            [self._sent_by(codec, at) for codec, at in zip(p, members, strict=True)] for p in pairs
        ]
        for codecs, rows in zip(pairs, sent, strict=True):
            at = members[0]
            outs = [
                torch.full((p.chunk_numel,), float("nan"), device="cpu")
                for p in at.layout.parameters
            ]
            codecs[0].decode_sum(torch.stack([s[0] for s in rows]), outs)
            self._check_sums(at, outs, 2)

    def _reduce_codec(self, stack: PluginStack, at: Case) -> Any:
        codec = self.contributions(stack, at)[REDUCE_CODEC].bind(*at.group)
        assert codec is not None
        return codec

    def _sent(self, stack: PluginStack, at: Case) -> Tensor:
        return self._sent_by(self._reduce_codec(stack, at), at)

    @staticmethod
    def _sent_by(codec: Any, at: Case, values: list[Tensor] | None = None) -> Tensor:
        pairs = zip(values or at.values(seed=at.rank), at.layout.parameters, strict=True)
        dtype = at.info.reduce_dtype
        chunks = [chunk_rows(value, placed).to(dtype) for value, placed in pairs]
        payloads = torch.full(
            (at.layout.world_size, codec.payload_bytes), 0xAB, dtype=torch.uint8, device="cpu"
        )
        given = [chunk.clone() for chunk in chunks]
        codec.begin(frozenset(range(len(chunks))))
        codec.encode(chunks, payloads)
        unchanged = all(map(torch.equal, chunks, given))
        assert unchanged, "encode changed the gradients it was given"
        return payloads

    def _check_sums(self, at: Case, outs: list[Tensor], world_size: int) -> None:
        for index, placed in enumerate(at.layout.parameters):
            rows = [chunk_rows(at.values(seed=r)[index], placed) for r in range(world_size)]
            expected = rows[0][at.rank].clone()
            for row in rows[1:]:
                expected += row[at.rank]
            real = real_mask(placed)[at.rank]
            tolerant = max(self.tolerance * world_size, 1e-6)
            torch.testing.assert_close(outs[index][real], expected[real], rtol=0, atol=4 * tolerant)
