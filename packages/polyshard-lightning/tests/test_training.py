"""Lightning's Trainer with the strategy computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="pip install 'polyshard-lightning[lightning]'")

import torch
from lightning_runs import Odd, alone, assert_equal, batch, batches, trainer, whole
from torch.distributed.tensor import DTensor

import polyshard
import polyshard_optimizers
from polyshard_lightning import PolyshardStrategy
from polyshard_testing import raises_in_step, ranks


@ranks(2, 3)
def test_weights_are_those_of_one_process(rank: int, size: int) -> None:
    module = Odd()
    trainer(size, PolyshardStrategy()).fit(module, batches(4, rank))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert_equal(whole(module), alone(size, 4))
    assert len(module.losses) == 4


@ranks(2)
@pytest.mark.parametrize("clip", [0.05, None])
def test_accumulation_reduces_once_and_clips_the_sum(
    rank: int, size: int, clip: float | None
) -> None:
    module = Odd()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": clip}
    trainer(size, PolyshardStrategy(), max_steps=2, **settings).fit(module, batches(4, rank))
    assert_equal(whole(module), alone(size, 4, accumulate=2, clip=clip))
    assert {one.reductions for one in polyshard.stats(module).groups.values()} <= {0, 2}


@ranks(2)
def test_evaluation_while_gradients_are_accumulated(rank: int, size: int) -> None:
    module = Odd()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    runs = trainer(size, PolyshardStrategy(), max_steps=2, **settings)
    runs.fit(module, batches(4, rank), batches(1, rank))
    assert len(module.seen) > 3
    assert_equal(whole(module), alone(size, 4, accumulate=2))


@ranks(2)
def test_evaluation_before_and_after_training(rank: int, size: int) -> None:
    module = Odd()
    runs = trainer(size, PolyshardStrategy())
    runs.validate(module, batches(1, rank), verbose=False)
    expected = Odd().loss(batch(0, rank)).item()
    assert module.seen == [pytest.approx(expected, rel=1e-5)]
    runs.fit(module, batches(4, rank), batches(1, rank))
    module.seen.clear()
    runs.test(module, batches(1, rank), verbose=False)
    assert module.seen == [pytest.approx(alone(size, 4).loss(batch(0, rank)).item(), rel=1e-4)]
    predictions: Any = runs.predict(module, batches(1, rank))
    [predicted] = predictions
    assert isinstance(predicted, torch.Tensor)
    assert predicted.shape == (4, 3)


class Chosen(Odd):
    """Shards some of itself, and steps runs of shards."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        polyshard.fully_shard(self.blocks[0], mesh=mesh)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return polyshard_optimizers.flat(torch.optim.AdamW(trained, lr=self.hparams["rate"]))


@ranks(2)
def test_configure_model_may_shard_and_the_optimizer_be_flat(rank: int, size: int) -> None:
    module = Chosen()
    trainer(size, "polyshard").fit(module, batches(4, rank))
    groups = [group.name for group in polyshard.describe(module).groups]
    assert [name for name in groups if name.startswith("blocks")] == ["blocks.0"]
    assert_equal(whole(module), alone(size, 4))


class Manual(Odd):
    """Steps by itself, inside ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, given: torch.Tensor, index: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(given)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


@ranks(2)
def test_manual_optimization(rank: int, size: int) -> None:
    module = Manual()
    trainer(size, PolyshardStrategy()).fit(module, batches(4, rank))
    assert_equal(whole(module), alone(size, 4))


@ranks(4)
def test_replicas_and_named_units(rank: int, size: int) -> None:
    module = Odd()
    strategy = PolyshardStrategy(units=["blocks.*/2"], mesh=(2, 2), reshard_after_forward=False)
    trainer(size, strategy).fit(module, batches(4, rank))
    parameters: Any = list(module.parameters())
    assert {tuple(p.device_mesh.shape) for p in parameters} == {(2, 2)}
    assert_equal(whole(module), alone(size, 4))


@ranks(2)
def test_precision(rank: int, size: int) -> None:
    for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        module = Odd()
        settings: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.5}
        trainer(size, PolyshardStrategy(), **settings).fit(module, batches(4, rank))
        assert {p.dtype for p in module.parameters()} == {dtype}
        for name, parameter in alone(size, 4, clip=0.5).named_parameters():
            found = whole(module)[name].float()
            torch.testing.assert_close(found, parameter.detach(), rtol=0.05, atol=0.05)


class Broken(Odd):
    """Raises once, in the middle of a forward of one rank."""

    fails_on = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.losses) == 2 and self.global_rank == self.fails_on:
            self.fails_on = -1
            self.blocks[0](x)
            raise ArithmeticError("a batch of one rank")
        return super().forward(x)


@ranks(2)
def test_an_exception_on_one_rank_ends_all_and_training_goes_on(rank: int, size: int) -> None:
    module = Broken()
    runs = trainer(size, PolyshardStrategy())
    with raises_in_step(ArithmeticError, "a batch of one rank"):
        runs.fit(module, batches(4, rank))
    before = len(module.losses)
    # On a device the other rank may see a loss before it learns of the failure.
    is_ahead = torch.get_default_device().type != "cpu" and rank != Broken.fails_on
    assert before in ((2, 3) if is_ahead else (2,))
    again = trainer(size, PolyshardStrategy(), max_steps=2)
    again.fit(module, batches(2, rank))
    assert len(module.losses) == before + 2
