"""``torch.compile`` around sharded modules: the same losses, and no recompilation after warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_models import Model, build, full, loss_of, shard, tokens_for

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.errors import UnsupportedError
from polyshard_testing import World, ranks

STEPS = 4
FULL: dict[str, Any] = {"fullgraph": True}
SMALL = {"width": 32, "hidden": 50, "layers": 2}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def before(model: Model, backend: str, **kwargs: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, **FULL)
    return shard(model, fully_shard, **kwargs)


def after(model: Model, backend: str, **kwargs: Any) -> nn.Module:
    shard(model, fully_shard, **kwargs)
    for block in model.blocks:
        block.compile(backend=backend, **FULL)
    return model


def wrapped(model: Model, backend: str, **kwargs: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend=backend, **FULL)
        model.blocks[index] = compiled
    return shard(model, fully_shard, **kwargs)


def whole(model: Model, backend: str, **kwargs: Any) -> nn.Module:
    shard(model, fully_shard, **kwargs)
    model.compile(backend=backend, **FULL)
    return model


def broken(model: Model, backend: str, **kwargs: Any) -> nn.Module:
    """The whole model, in graphs that may end at units."""
    shard(model, fully_shard, **kwargs)
    model.compile(backend=backend)
    return model


WAYS: dict[str, Callable[..., nn.Module]] = {
    "before": before,
    "after": after,
    "wrapped": wrapped,
    "whole": whole,
    "broken": broken,
}


def losses_of(model: nn.Module, rank: int, graphs: list[int]) -> list[float]:
    from torch._dynamo.utils import counters

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, tokens_for(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses


def compiled(rank: int, size: int, way: str, backend: str, kwargs: dict[str, Any]) -> None:
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    expected = losses_of(shard(build(**SMALL), fully_shard, **kwargs), rank, [])
    graphs: list[int] = []
    losses = losses_of(WAYS[way](build(**SMALL), backend, **kwargs), rank, graphs)
    breaks = dict(counters["graph_break"])
    dynamo.reset()
    assert bool(breaks) is (way == "broken")
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[1] == graphs[-1], f"compiled again after warm-up: {graphs}"
    if backend == "aot_eager":  # the same kernels
        assert losses == expected
    torch.testing.assert_close(losses, expected, rtol=2e-3 if kwargs else 1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_compiled_models_train_alike(world2: World, way: str) -> None:
    world2.run(compiled, way, "aot_eager", {}, timeout=180.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frees", [False, True])
def test_compiled_and_told_when_to_free(world2: World, frees: bool) -> None:
    for way in ("after", "whole"):
        world2.run(compiled, way, "aot_eager", {"reshard_after_forward": frees}, timeout=180.0)


@pytest.mark.thorough
def test_compiled_with_blocks_of_ranks(world4: World) -> None:
    for way in ("after", "whole"):
        world4.run(compiled, way, "aot_eager", {"reshard_after_forward": 2}, timeout=180.0)


def test_compiled_with_mixed_precision(world2: World) -> None:
    for way in ("before", "whole"):
        world2.run(compiled, way, "aot_eager", {"mp_policy": BF16}, timeout=180.0)


@pytest.mark.thorough  # what is compiled is the same with aot_eager
def test_inductor_code(world2: World) -> None:
    for way in ("before", "whole"):
        world2.run(compiled, way, "inductor", {}, timeout=180.0)


class Checkpointing(Model):
    """Recomputes each block in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: torch.Tensor = self.head(x)
        return out


@ranks(2, timeout=180.0)
def test_everything_together(rank: int, size: int) -> None:
    """The torchtitan recipe: checkpointing, compiled blocks, sharding, clipping, accumulation."""
    import torch._dynamo as dynamo

    dynamo.reset()
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = Checkpointing(**SMALL)
        if compiles:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        shard(model, fully_shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = loss_of(model, tokens_for(10 * step + micro, rank)) / 2
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    dynamo.reset()
    assert found[0] == found[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


@ranks(2, timeout=120.0)
def test_equal_blocks_are_compiled_once(rank: int, size: int) -> None:
    """Twelve blocks take as many compilations as torch's own engine needs for them."""
    from torch._dynamo.testing import CompileCounter

    counts = []
    for engine in (fully_shard, torch.distributed.fsdp.fully_shard):
        torch._dynamo.reset()
        compiled = CompileCounter()
        model = nn.Sequential(*[Block() for _ in range(12)])
        for block in model:
            block.compile(backend=compiled)
            engine(block)
        engine(model)
        assert len({type(block) for block in model}) == 1
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        counts.append(compiled.frame_count)
    assert counts[0] == counts[1]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.tanh(self.layer(x)) * scale, {"mean": x.mean()}


class Outer(nn.Module):
    """A unit that calls a unit, and gives and takes more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Inner(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
        y, extra = self.inner(x, scale)
        return x + self.layer(y), extra


class Nested(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Outer() for _ in range(3)])
        self.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, extras = self.table(tokens), []
        for block in self.blocks:
            if self.recomputes:
                x, extra = checkpoint(block, x, scale=0.5, use_reentrant=False)
            else:
                x, extra = block(x, scale=0.5)
            extras.append(extra["mean"])
        loss: torch.Tensor = x.square().mean() + torch.stack(extras).sum()
        return loss


def nested(rank: int, size: int, recomputes: bool) -> None:
    """One graph around all units, and one for each class of them."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    found = []
    for compiles in (False, True):
        dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model: Any = Nested(recomputes)
        fully_shard(model.table)
        for block in model.blocks:
            fully_shard(block.inner)
            fully_shard(block)
        fully_shard(model)

        def loss_of_step(tokens: torch.Tensor, model: Any = model) -> torch.Tensor:
            loss: torch.Tensor = model(tokens)
            return loss

        call: Any = loss_of_step
        if compiles:  # the root itself is a unit inside the graph
            call = torch.compile(loss_of_step, backend="aot_eager", **FULL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, graphs = [], []
        for step in range(3):
            loss = call(torch.arange(6).view(2, 3) + step + rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            losses += [call(torch.arange(6).view(2, 3)).item() for _ in range(2)]
        assert not counters["graph_break"]
        assert graphs == graphs[:1] * 3, "compiled again"
        assert bool(graphs[0]) is compiles
        found.append(losses)
    dynamo.reset()
    assert found[0] == found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recomputes", [False, True], ids=["keeps", "recomputes"])
def test_nested_units_in_one_graph(world2: World, recomputes: bool) -> None:
    world2.run(nested, recomputes, timeout=180.0)


class Shifts(nn.Module):
    """A unit that is given numbers: a position in a cache, the length of a batch, a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, start: int, rows: int, scales: bool, factor: float
    ) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * (start if scales else 1) + rows * factor
        return out


@ranks(2, timeout=120.0)
def test_numbers_may_differ_from_call_to_call(rank: int, size: int) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    torch.manual_seed(0)
    unit: Any = fully_shard(Shifts())

    def sum_of(x: torch.Tensor, start: int, factor: float) -> torch.Tensor:
        out: torch.Tensor = unit(x, start, x.shape[0], scales=True, factor=factor)
        return out.square().sum()

    call: Any = torch.compile(sum_of, backend="aot_eager", **FULL)
    for start, rows, factor in ((3, 2, 0.5), (4, 2, 0.5), (5, 6, 0.7), (7, 3, 0.9)):
        x = torch.arange(8.0).expand(rows, 8)
        losses, gradients = [], []
        for function in (call, sum_of):
            loss = function(x, start, factor)
            loss.backward()
            losses.append(loss.item())
            gradients.append(full(unit.layer.weight.grad))
            unit.zero_grad()
        assert losses[0] == losses[1]
        assert torch.equal(*gradients)
    dynamo.reset()


class Boxed:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Boxed:
        return Boxed(self.layer(x))


@ranks(2, timeout=120.0)
def test_what_cannot_leave_a_graph_is_named(rank: int, size: int) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    unit: Any = fully_shard(Boxing())

    def sum_of(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = unit(x).value.sum()
        return total

    call: Any = torch.compile(sum_of, backend="eager", **FULL)
    with pytest.raises(Exception, match="a Boxed goes in or out of a sharded module"):
        call(torch.ones(2, 8))
    dynamo.reset()


class Changing(nn.Module):
    """A unit that changes what it is given, once it is told to, and says with which factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, float]:
        if self.factor != 1.0:
            cache.mul_(self.factor)
        return self.layer(x), self.factor


def compiled_sum(unit: Any) -> Any:
    def sum_of(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        before = cache.sum()
        y, factor = unit(x, cache)
        total: torch.Tensor = y.sum() + before + factor * cache.sum()
        return total

    return torch.compile(sum_of, backend="aot_eager", **FULL)


@pytest.mark.parametrize("begins", [True, False], ids=["at once", "later"])
@ranks(2, timeout=120.0)
def test_a_unit_that_changes_its_input_is_refused(rank: int, size: int, begins: bool) -> None:
    """The graph around it computed with the old values, or with the new ones, as it liked."""
    import torch._dynamo as dynamo

    dynamo.reset()
    unit: Any = fully_shard(Changing(2.0 if begins else 1.0))
    call = compiled_sum(unit)
    if not begins:
        call(torch.ones(2, 8), torch.ones(2, 8)).backward()
        unit.factor = 2.0
    with pytest.raises(UnsupportedError, match="changes a tensor that it is given, in place"):
        call(torch.ones(2, 8), torch.ones(2, 8))
    dynamo.reset()


class Counting(Changing):
    """One that changes nothing but what it returns beside a tensor."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self.layer(x) + cache, self.factor


@ranks(2, timeout=120.0)
def test_a_number_that_a_unit_returns_is_not_taken_for_the_first_one(rank: int, size: int) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    unit: Any = fully_shard(Counting(3.0))
    call = compiled_sum(unit)
    for _ in range(2):
        call(torch.ones(2, 8), torch.ones(2, 8)).backward()
    unit.factor = 4.0
    with pytest.raises(UnsupportedError, match="returned other numbers, texts or containers"):
        call(torch.ones(2, 8), torch.ones(2, 8))
    dynamo.reset()


class Shrinking(Changing):
    """One that returns as many rows as it is told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out: torch.Tensor = self.layer(x)
        return out[: int(self.factor)]


@ranks(2, timeout=120.0)
def test_sizes_that_a_graph_was_not_made_for_are_refused(rank: int, size: int) -> None:
    """A mean over the rows would be divided by the number that there were at first."""
    import torch._dynamo as dynamo

    dynamo.reset()
    unit: Any = fully_shard(Shrinking(3.0))

    def mean_of(x: torch.Tensor) -> torch.Tensor:
        y = unit(x)
        mean: torch.Tensor = y.sum() / y.shape[0]
        return mean

    call = torch.compile(mean_of, backend="aot_eager", **FULL)
    torch.testing.assert_close(call(torch.ones(6, 8)), mean_of(torch.ones(6, 8)))
    unit.factor = 2.0
    with pytest.raises(UnsupportedError, match=r"returned tensors of \(dtype, sizes\)"):
        call(torch.ones(6, 8))
    dynamo.reset()


class Remembering(nn.Module):
    """A unit that counts its calls, and keeps something of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        self.calls += 1
        self.text = f"call {self.calls}"
        self.last = out.detach()
        return out


@ranks(2, timeout=120.0)
def test_a_rehearsal_is_no_call(rank: int, size: int) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    unit: Any = fully_shard(Remembering())

    def sum_of(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = unit(x).sum()
        return total

    call = torch.compile(sum_of, backend="aot_eager", **FULL)
    for number, rows in ((1, 2), (2, 2), (3, 5)):  # compiled again for more rows
        loss = call(torch.ones(rows, 8) * number)
        loss.backward()
        assert (unit.calls, unit.text) == (number, f"call {number}")
        assert unit.last.sum().item() == loss.item()
    dynamo.reset()


@ranks(2, timeout=120.0)
def test_what_a_unit_keeps_is_not_taken_from_an_earlier_call(rank: int, size: int) -> None:
    """A function that read it would have the value of the call before, in graphs without breaks."""
    import torch._dynamo as dynamo

    dynamo.reset()
    first: Any = fully_shard(Remembering())
    second: Any = fully_shard(Remembering())

    def sum_of(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = second(first(x)).sum()
        last: torch.Tensor = first.last
        return total + last.sum()

    sum_of(torch.ones(2, 8)).backward()
    call = torch.compile(sum_of, backend="aot_eager", **FULL)
    with pytest.raises(Exception, match=r"last: torch.Tensor = first\.last|Cannot wrap a Tensor"):
        call(torch.ones(2, 8))
    dynamo.reset()
