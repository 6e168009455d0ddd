"""Sharded models that are trained with flat steps, beside the same ones without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from toy_models import Model, build, loss_of, shard, tokens_for
from toy_optimizers import Make, same_bits

from polyshard import fully_shard
from polyshard_optimizers import flat

Event = Callable[[int, Any], None]


class Trained:
    """A model and its optimizer; ``is_flat`` says how that steps."""

    def __init__(
        self,
        make: Make,
        rank: int,
        *,
        is_flat: bool,
        sharding: Callable[..., Any] = fully_shard,
        **keywords: Any,
    ) -> None:
        """``make`` makes the optimizer; ``keywords`` are those of ``sharding``."""
        self.rank = rank
        self.model: Model = shard(build(width=64, hidden=50, layers=2), sharding, **keywords)
        self.optimizer: Optimizer = make(self.model.parameters())
        self.saved: Any = None
        self.kept: list[Any] = []
        if is_flat:
            flat(self.optimizer)

    def step(self, index: int, event: Event | None = None) -> float:
        """One step; ``event`` comes between the backward and the optimizer's step."""
        loss = loss_of(self.model, tokens_for(index, self.rank))
        loss.backward()
        if event is not None:
            event(index, self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def assert_same(theirs: Trained, ours: Trained) -> None:
    """Weights and state have the same bits, and the same form."""
    for one, other in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        assert same_bits(local_part(one), local_part(other))
    first, second = theirs.optimizer.state_dict(), ours.optimizer.state_dict()
    assert first["state"].keys() == second["state"].keys()
    for key, state in first["state"].items():
        assert state.keys() == second["state"][key].keys()
        for name, value in state.items():
            found = second["state"][key][name]
            if isinstance(value, DTensor):
                assert isinstance(found, DTensor)
                assert found.placements == value.placements
                assert found.shape == value.shape
            assert same_bits(local_part(value), local_part(found)), (key, name)


def local_part(value: Tensor) -> Tensor:
    """Of a ``DTensor``; a plain tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def compare(make: Make, rank: int, event: Event | None = None, **keywords: Any) -> Trained:
    """Train both ways for some steps."""
    pair = [Trained(make, rank, is_flat=is_flat, **keywords) for is_flat in (False, True)]
    for index in range(5):
        losses = [trained.step(index, event) for trained in pair]
        assert losses[0] == losses[1]
        assert_same(*pair)
    return pair[1]
