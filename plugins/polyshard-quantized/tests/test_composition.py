"""Beside what the engine does in other ways: blocks of ranks, compiled units, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_models import Model, Oracle, build, one_hop, shard, tokens_for, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_models import loss_of

from polyshard import MixedPrecisionPolicy, describe, fully_shard, stats
from polyshard_quantized import Int8Block, QuantizedComm, round_trip
from polyshard_testing import World, ranks


def in_blocks(rank: int, size: int, block_size: int) -> None:
    """Blocks keep decoded parameters between forward and backward: nothing is rounded twice."""
    form = Int8Block()
    expected = Oracle(size, form, one_hop(form)).train(build(), rank)
    plugin = QuantizedComm(gradients=form)
    model = shard(build(), [plugin], reshard_after_forward=block_size)
    preview = describe(model)
    assert f"to {block_size} ranks" in str(preview)
    assert train(model, rank) == expected
    before = stats(model).bytes_sent
    loss_of(model, tokens_for(0, rank)).backward()
    assert stats(model).bytes_sent - before == preview.step_bytes
    for block in preview.groups[:2]:  # in backward a block exchanges what it decoded, natively
        slice_bytes = -(-block.layout.unsharded_numel // block_size) * 4
        assert block.regather_bytes == (block_size - 1) * slice_bytes
        assert block.gather_bytes < 0.3 * block.unsharded_bytes


def test_resharding_to_blocks_of_ranks(world4: World) -> None:
    world4.run(in_blocks, 2)


@ranks(4)
def test_blocks_hold_what_was_decoded(rank: int, size: int) -> None:
    model = shard(build(), [QuantizedComm()], reshard_after_forward=2)
    master = model.blocks[0].up.weight.full_tensor()
    seen: list[Tensor] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    up.register_full_backward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    loss_of(model, tokens_for(0, rank)).backward()
    forward, backward = seen
    assert torch.equal(forward, backward)
    assert torch.equal(forward, round_trip(master, Int8Block()))
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2.0)  # what blocks kept must not outlive a step
    seen.clear()
    loss_of(model, tokens_for(0, rank)).backward()
    assert all(torch.equal(value, round_trip(2 * master, Int8Block())) for value in seen)


# Compiled -------------------------------------------------------------------------------------


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _compile(units: list[nn.Module]) -> None:
    for unit in units:
        unit.compile(backend="aot_eager")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["before", "after", "whole"])
@ranks(2, timeout=180.0)
def test_whole_units_compiled(rank: int, size: int, way: str) -> None:
    """The same kernels, so the same bits; and no new graph when payloads or buffers come and go."""
    import torch._dynamo as dynamo

    dynamo.reset()
    start = graphs()
    eager = shard(build(), [QuantizedComm(gradients=Int8Block())])
    model: Any = build()
    units: list[nn.Module] = [model] if way == "whole" else list(model.blocks)
    if way == "before":
        _compile(units)
    shard(model, [QuantizedComm(gradients=Int8Block())])
    if way != "before":
        _compile(units)
    assert train(model, rank, steps=1) == train(eager, rank, steps=1)
    warm = graphs()
    assert warm > start, "nothing was compiled"
    assert train(model, rank, micro_batches=2) == train(eager, rank, micro_batches=2)
    assert graphs() == warm, "compiled again after warm-up"
    dynamo.reset()


# Recomputed and accumulated -------------------------------------------------------------------


class Recomputing(Model):
    """Recomputes each block in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


def recomputing() -> Recomputing:
    torch.manual_seed(0)
    return Recomputing()


def recomputed(rank: int, size: int, keywords: dict[str, Any]) -> None:
    """Reduced in every micro-batch: bitwise what one process computes."""
    form = Int8Block()
    expected = Oracle(size, form, one_hop(form)).train(build(), rank, micro_batches=3)
    model = shard(recomputing(), [QuantizedComm(gradients=form)], **keywords)
    assert train(model, rank, micro_batches=3) == expected


def unsynchronised(rank: int, size: int, compiles: bool) -> None:
    """Reduced once a step: what the same training gives without recomputation."""
    import torch._dynamo as dynamo

    found = []
    for model in (build(), recomputing()):
        if compiles and isinstance(model, Recomputing):
            _compile(list(model.blocks))
        plugin = QuantizedComm(gradients=Int8Block())
        sharded = shard(model, [plugin])
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        losses: list[float] = []
        for step in range(3):
            for micro in range(3):
                sharded.set_requires_gradient_sync(micro == 2)
                loss = loss_of(sharded, tokens_for(10 * step + micro, rank)) / 3
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    dynamo.reset()
    assert found[0] == found[1]


def test_checkpointing_with_accumulation(world2: World) -> None:
    for keywords in ({}, {"reshard_after_forward": False}):
        world2.run(recomputed, keywords)
    world2.run(unsynchronised, False)


def test_checkpointing_with_accumulation_in_blocks(world4: World) -> None:
    world4.run(recomputed, {"reshard_after_forward": 2})


def test_checkpointing_with_accumulation_compiled(world2: World) -> None:
    world2.run(unsynchronised, True, timeout=180.0)


@ranks(2)
def test_the_plugin_changes_bits(rank: int, size: int) -> None:
    """The comparisons above would notice a plugin that does nothing."""
    plain: Any = recomputing()
    for block in plain.blocks:
        fully_shard(block)
    fully_shard(plain)
    quantized = shard(recomputing(), [QuantizedComm(gradients=Int8Block())])
    assert train(plain, rank) != train(quantized, rank)


# Scaled losses --------------------------------------------------------------------------------


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor()
    return whole.detach().clone()


@ranks(2)
def test_scaled_losses(rank: int, size: int) -> None:
    """Scaling and unscaling give what no scaling gives; overflow of one rank stops all of them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    plugin = QuantizedComm(gradients=Int8Block())
    model = shard(build(), [plugin], mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=2.0**10, growth_interval=1000
    )
    gradients = []
    for scale in (False, True):
        for micro in range(2):
            loss = loss_of(model, tokens_for(micro, rank))
            (scaler.scale(loss) if scale else loss).backward()
        if scale:
            scaler.unscale_(optimizer)
        gradients.append([full(p.grad) for p in model.parameters()])
        if not scale:
            optimizer.zero_grad()
    # A power of two moves exponents alone, but float16 drops small values of what is not scaled,
    # which moves a code that was about to be the next one.
    for plain, unscaled in zip(*gradients, strict=True):
        code = float(plain.abs().max()) / 127
        torch.testing.assert_close(unscaled, plain, rtol=0.0, atol=code)
    before = [full(p) for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    stepped = [full(p) for p in model.parameters()]
    assert scaler.get_scale() == 2.0**10
    assert not all(torch.equal(a, b) for a, b in zip(before, stepped, strict=True))
    optimizer.zero_grad()
    loss = loss_of(model, tokens_for(3, rank)) * (torch.inf if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    for value, parameter in zip(stepped, model.parameters(), strict=True):
        assert torch.equal(full(parameter), value)
