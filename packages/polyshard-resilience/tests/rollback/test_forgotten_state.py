"""State that no state dict has: stages of a gradient scaler, buffers that were none, mappings."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyshard
import polyshard_resilience
from polyshard_resilience.errors import AttemptError
from polyshard_resilience.rollback.copies import Kept, Memory
from polyshard_testing import ranks

SCALE = 1024.0


def fail(*args: object) -> None:
    raise ValueError("fails")


@pytest.mark.parametrize("is_fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscales", [False, True], ids=["steps", "unscales"])
@ranks(1)
def test_a_scaler_scales_the_next_try_as_the_first(
    rank: int, size: int, unscales: bool, is_fused: bool
) -> None:
    """A failure comes between unscaling and ``update()``: what was unscaled is not any more."""
    x = torch.ones(8, 4)

    def trained(*, fails: bool) -> Tensor:
        torch.manual_seed(0)
        model: Any = polyshard.fully_shard(nn.Linear(4, 1, bias=False))
        kind: Any = torch.optim.AdamW if is_fused else torch.optim.SGD
        settings = {"fused": True} if is_fused else {"foreach": True}
        optimizer = kind(model.parameters(), lr=0.125, **settings)
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=SCALE)

        def attempt() -> None:
            with polyshard_resilience.attempt(model, optimizer, also=[scaler]):
                scaler.scale(model(x).sum()).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        if fails:
            hook = optimizer.register_step_pre_hook(fail)
            with pytest.raises(AttemptError):
                attempt()
            hook.remove()
        attempt()
        whole: Tensor = model.weight.full_tensor().detach()
        return whole

    assert torch.equal(trained(fails=True), trained(fails=False))


class Centred(nn.Module):
    """A buffer comes with the first batch, one was made by ``expand``, one in inference mode."""

    center: Tensor | None
    cache: Tensor
    same: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("center", None)
        self.register_buffer("same", torch.ones(1).expand(3))
        with torch.inference_mode():
            self.register_buffer("cache", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.center is None:
            self.center = x.detach().mean(0)
            self.register_buffer("count", torch.ones(()), persistent=False)
            with torch.inference_mode():
                self.cache.add_(1.0)
        out: Tensor = self.linear(x - self.center) * self.same
        return out


@ranks(1)
def test_buffers_of_every_kind_are_as_before(rank: int, size: int) -> None:
    model: Any = polyshard.fully_shard(Centred())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = set(model.state_dict())

    def attempt() -> None:
        with polyshard_resilience.attempt(model, optimizer):
            model(torch.full((2, 3), 7.0)).sum().backward()
            fail()

    with pytest.raises(AttemptError):
        attempt()
    assert model.center is None
    assert not hasattr(model, "count")
    assert model.cache.tolist() == [0.0] * 3
    assert model.same.tolist() == [1.0] * 3
    assert set(model.state_dict()) == saved


def test_mappings_keep_their_kind() -> None:
    kept = Kept(Memory())
    trees: list[dict[str, Any]] = [
        Counter(a=1, b=2),
        OrderedDict(b=torch.ones(2), a=1),
        defaultdict(list, {"a": [1]}),
        {"plain": Counter(c=3)},
    ]
    places = [kept.add(tree) for tree in trees]
    kept.take()
    for tree, place in zip(trees, places, strict=True):
        found = kept.afresh(place)
        assert type(found) is type(tree)
        assert list(found) == list(tree)
    counted = kept.afresh(places[0])
    counted["new"] += 1
    assert counted == Counter(a=1, b=2, new=1)
    assert kept.afresh(places[2])["none"] == []
    assert type(kept.afresh(places[3])["plain"]) is Counter


def test_a_module_keeps_the_versions_of_its_state() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    kept = Kept(Memory())
    place = kept.add(state)
    kept.take()
    assert kept.afresh(place)._metadata == state._metadata  # type: ignore[attr-defined]


class FailsOnce(torch.optim.AdamW):
    """Runs out of memory in the first step, on the last rank."""

    failures: list[int]  # no number, which an attempt would put back

    def step(self, closure: Any = None) -> Any:
        if self.failures:
            self.failures.clear()
            raise MemoryError("for the first state")
        return super().step(closure)


@ranks(2)
def test_windows_of_a_guard_are_counted_anew(rank: int, size: int) -> None:
    """One rank has stepped and opened a window, the other has not: both look at the next one."""
    model = polyshard.fully_shard(nn.Linear(8, 8))
    optimizer = FailsOnce(model.parameters())
    optimizer.failures = [1] if rank == size - 1 else []
    guard = polyshard_resilience.Corruption(model, optimizer, every=1)

    def attempt() -> None:
        with polyshard_resilience.attempt(model, optimizer):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(AttemptError):
        attempt()
    for _ in range(3):
        attempt()
    guard.check()
