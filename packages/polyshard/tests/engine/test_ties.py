"""Parameters shared between units, against the same model with the tie inside one unit.

The whole of what a step does with them has to be the same bits; one process has to be close.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_models import Block, full

import polyshard
from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard._torch.planned import planned_ranks
from polyshard.errors import ModuleError
from polyshard.module.schedule import own_unit, units_of
from polyshard_optimizers import flat as flat_steps
from polyshard_testing import ranks

WORDS = 13  # divides by no number of ranks


class Language(nn.Module):
    """An embedding, blocks, and a head tied to the embedding."""

    def __init__(self, layers: int = 2, width: int = 6, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, 10) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.embed.weight
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        out: Tensor = (
            checkpoint(self.head, x, use_reentrant=False) if self.recompute else self.head(x)
        )
        return out


def inside(model: Language, engine: Callable[..., Any] = fully_shard, **given: Any) -> Language:
    """The root has the tie for its own."""
    for block in model.blocks:
        engine(block, **given)
    engine(model, **given)
    return model


def across(model: Language, **given: Any) -> Language:
    """Each user of the table is a unit."""
    for module in (model.embed, *model.blocks, model.head):
        fully_shard(module, **given)
    fully_shard(model, **given)
    return model


def head_first(model: Language, **given: Any) -> Language:
    for module in (model.head, model.embed, *model.blocks):
        fully_shard(module, **given)
    fully_shard(model, **given)
    return model


def by_root(model: Language, **given: Any) -> Language:
    """The root has the head, and so one of both users, for its own."""
    fully_shard(model.embed, **given)
    return inside(model, **given)


SHAPES = {"across": across, "head first": head_first, "by root": by_root}


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (2, 5), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten())


def train(model: Any, optimizer: Any, rank: int, steps: int = 3, **how: Any) -> list[float]:
    losses = []
    for step in range(steps):
        parts = how.get("accumulate", 1)
        for part in range(parts):
            if parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)
            loss = loss_of(model, batch(10 * step + part, rank))
            loss.backward()
            losses.append(float(loss.detach()))
        if "clip" in how:
            norm = polyshard.clip_grad_norm_(model.parameters(), how["clip"])
            losses.append(float(full(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adam(model: nn.Module, *, flat: bool = False) -> Any:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return flat_steps(made) if flat else made


def assert_same(ours: Any, other: nn.Module) -> None:
    names = [name for name, _ in other.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    for (name, a), (_, b) in zip(ours.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(full(a.detach()), full(b.detach())), name
    assert ours.head.weight is ours.embed.weight


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "recomputed": ({}, {"recompute": True}),
    "accumulated": ({}, {"accumulate": 3}),
    "clipped": ({}, {"clip": 0.05}),
    "flat": ({}, {"flat": True}),
    "freed": ({"reshard_after_forward": True}, {"recompute": True}),
    "kept": ({"reshard_after_forward": False}, {"accumulate": 2}),
    "bf16": ({"mp_policy": BF16}, {"clip": 0.05, "accumulate": 2}),
    "prefetched": ({}, {"prefetch": True}),
    "frozen": ({}, {"frozen": True}),
    "frozen later": ({}, {"frozen_later": True}),
}


@pytest.mark.sampled(18)  # of 2, 3 and 4 ranks, all shapes and all ways
@ranks(2, 3, 4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_inside_one_unit(rank: int, size: int, way: str, shape: str) -> None:
    given, how = WAYS[way]
    found = []
    for sharded in (SHAPES[shape], inside):
        model: Any = Language()
        model.embed.weight.requires_grad_(not how.get("frozen"))
        model.recompute = how.get("recompute", False)
        sharded(model, **given)
        if how.get("prefetch"):
            units = [*model.blocks]
            model.set_modules_to_forward_prefetch(units)
            units[-1].set_modules_to_backward_prefetch(units[:-1])
        optimizer = adam(model, flat=how.get("flat", False))
        losses = train(model, optimizer, rank, **how)
        if how.get("frozen_later"):
            model.embed.weight.requires_grad_(False)
            losses += train(model, optimizer, rank)
            model.embed.weight.requires_grad_(True)
            losses += train(model, optimizer, rank)
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same(found[0][0], found[1][0])


@ranks(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_torch(rank: int, size: int, shape: str) -> None:
    ours, reference = SHAPES[shape](Language()), inside(Language(), torch_fully_shard)
    assert train(ours, adam(ours), rank, 5) == train(reference, adam(reference), rank, 5)
    assert_same(ours, reference)


@ranks(2, 4)
def test_one_process_trains_the_same(rank: int, size: int) -> None:
    """Plain SGD, whose rounding stays small."""
    ours, reference = across(Language()), Language()
    for step in range(3):
        loss_of(ours, batch(step, rank)).backward()
        for other in range(size):
            (loss_of(reference, batch(step, other)) / size).backward()
        for model in (ours, reference):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
                    parameter.grad = None
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(a.detach()), b.detach(), msg=name)


@ranks(4)
def test_with_replicas_and_blocks(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicas", "shard")
    )
    for given in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        ours, other = across(Language(), **given), inside(Language(), **given)
        assert train(ours, adam(ours), rank) == train(other, adam(other), rank)
        assert_same(ours, other)


def test_blocks_keep_what_was_described_before() -> None:
    """The table moves to a unit whose blocks do not divide the memory that was made for it."""
    plans = []
    with planned_ranks(6, "gloo"):
        for is_early in (False, True):
            model: Any = Language(width=16)
            fully_shard(model.embed)
            if is_early:
                describe(model.embed)
            plans.append(describe(fully_shard(model, reshard_after_forward=3)))
    late, early = (plan.groups for plan in plans)
    assert early == late
    assert all(group.reshard_after_forward == 3 for group in early)
    assert any(group.layout.unsharded_numel % 3 for group in early)


@ranks(2)
def test_the_root_gathers_and_reduces_it_once(rank: int, size: int) -> None:
    model: Any = across(Language())
    names = dict(groups(model))
    holders = [unit.name for unit in units_below(model) if names["embed.weight"] in unit.groups]
    loss_of(model, batch(0, rank)).backward()
    assert [unit.name for unit in units_below(model) if names["embed.weight"] in unit.groups] == [
        "(root)"
    ]
    assert len(holders) == 1
    traffic = names["embed.weight"].meter.traffic
    assert (traffic.gathers, traffic.reductions) == (1, 1)
    assert model.embed.weight.grad is model.head.weight.grad
    assert str(describe(model)).count("embed.weight") <= 1


def units_below(model: nn.Module) -> list[Any]:
    sharded = [m for m in model.modules() if isinstance(m, polyshard.FSDPModule)]
    return list(dict.fromkeys(units_of(sharded, "test")))


def groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    fqns = {id(p): name for name, p in model.named_parameters()}
    for unit in units_below(model):
        for group in unit.groups:
            for parameter in group.shards.parameters:
                yield fqns[id(parameter.parameter)], group


class Pair(nn.Module):
    """Two towers with a table each, which are tied; the first tower has another user inside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.bias = Language(seed=0), Language(seed=1), nn.Linear(WORDS, 3)
        self.third = nn.Linear(6, WORDS, bias=False)
        self.third.weight = self.left.embed.weight

    def forward(self, tokens: Tensor, *, all_of_it: bool = True) -> Tensor:
        x = self.left(tokens) + self.right(tokens)
        if all_of_it:
            x = x + self.third(self.left.embed(tokens))
        return cast("Tensor", x)


@ranks(2, 3)
def test_it_belongs_to_the_innermost_unit_that_contains_all_users(rank: int, size: int) -> None:
    """And moves on when a unit further out meets one more user."""
    found = []
    for shard in (across, inside):
        model: Any = Pair()
        if shard is across:
            across(model.left)
            across(model.right)
            named = dict(groups(model.right))
            assert named["embed.weight"] in own_unit(model.right).groups
            fully_shard(model.third)
            fully_shard(model)
            named = dict(groups(model))
            assert named["left.embed.weight"] in own_unit(model).groups
            assert named["right.embed.weight"] in own_unit(model.right).groups
        else:
            for block in (*model.left.blocks, *model.right.blocks):
                fully_shard(block)
            fully_shard(model)
        optimizer = adam(model)
        found.append((train(model, optimizer, rank), model))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1].parameters(), found[1][1].parameters(), strict=True):
        assert torch.equal(full(a.detach()), full(b.detach()))
    assert found[0][1].third.weight is found[0][1].left.head.weight


class Looped(nn.Module):
    """Layers of which each has its own norm and all share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@ranks(2, 3)
def test_a_matrix_of_all_layers(rank: int, size: int) -> None:
    """Other parameters of the first layer go with it: a group moves whole."""
    found = []
    for is_apart in (True, False):
        model: Any = Looped()
        for layer in model.layers if is_apart else ():
            fully_shard(layer)
        fully_shard(model)
        optimizer = adam(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(2, 5, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([full(p.detach()) for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@ranks(2)
@pytest.mark.parametrize("when", ["before the root", "after the root"])
def test_an_optimizer_made_early_steps_it(rank: int, size: int, when: str) -> None:
    """Moving up keeps the objects that an optimizer holds."""
    model = Language()
    for module in (model.embed, model.head):
        fully_shard(module)
    early = model.embed.weight
    for block in model.blocks:
        fully_shard(block)
    if when == "before the root":
        optimizer = torch.optim.SGD([early], lr=1.0)
        fully_shard(model)
    else:
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = full(early.detach()).clone()
    loss_of(model, batch(0, rank)).backward()
    gradient = full(early.grad)  # type: ignore[arg-type]
    optimizer.step()
    assert model.embed.weight is early
    assert model.head.weight is early
    assert torch.equal(full(early.detach()), before - gradient)
    assert gradient.abs().sum() > 0


@ranks(2, 3)
def test_from_meta(rank: int, size: int) -> None:
    """accelerate#3154: ties were lost by ``to_empty``; here objects stay, and so does the tie."""
    with torch.device("meta"):
        model: Any = across(Language())
    model.to_empty(device=torch.get_default_device())
    assert model.head.weight is model.embed.weight
    reference = inside(Language())
    states: Any = {name: full(v) for name, v in reference.state_dict().items()}
    set_model_state_dict(model, states, options=polyshard_options(full_state_dict=True))
    assert train(model, adam(model), rank) == train(reference, adam(reference), rank)
    assert_same(model, reference)


def polyshard_options(**given: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(**given)


@ranks(2)
def test_state_dicts_keep_the_tie(rank: int, size: int) -> None:
    model: Any = across(Language())
    train(model, adam(model), rank)
    states = model.state_dict()
    assert states["embed.weight"].to_local().data_ptr() == (
        states["head.weight"].to_local().data_ptr()
    )
    other: Any = across(Language(seed=5))
    other.load_state_dict(states)
    assert_same(other, model)
    third: Any = across(Language(seed=6))
    third.load_state_dict(get_model_state_dict(other), assign=True)
    assert_same(third, model)
    assert train(third, adam(third), rank) == train(other, adam(other), rank)
    assert_same(third, other)


@ranks(2)
def test_conversion_and_ending(rank: int, size: int) -> None:
    model: Any = across(Language())
    train(model, adam(model), rank)
    model.to(torch.float64)
    assert model.embed.weight.dtype is torch.float64
    assert model.head.weight is model.embed.weight
    train(model, adam(model), rank)
    with torch.no_grad():
        model.eval()(batch(0, rank))
    table = weakref.ref(model.embed.weight)
    del model
    gc.collect()
    assert table() is None


@ranks(2)
def test_a_step_that_broke_off(rank: int, size: int) -> None:
    ours, other = across(Language()), inside(Language())
    for model in (ours, other):
        with pytest.raises(RuntimeError, match="indices"):
            model(torch.ones(1, 1))
        model.reset_iter_state()  # type: ignore[operator]
    assert train(ours, adam(ours), rank) == train(other, adam(other), rank)
    assert_same(ours, other)


def pair() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@ranks(2)
@pytest.mark.parametrize("outermost", [0, 1])
def test_without_a_unit_that_contains_all_users(rank: int, size: int, outermost: int) -> None:
    """The forward that would be wrong is refused, on every rank, and a root repairs it."""
    model = pair()
    fully_shard(model[0])
    fully_shard(model[1])
    assert model[0].weight is model[1].weight
    with pytest.raises(ModuleError, match=r"outside of FSDPLinear.*module that contains all"):
        model[outermost](torch.ones(1, 4))
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is not None


@ranks(2)
def test_terms_that_differ(rank: int, size: int) -> None:
    replicas = init_device_mesh(
        torch.get_default_device().type, (1, size), mesh_dim_names=("replicate", "shard")
    )
    for given in ({"mp_policy": BF16}, {"mesh": replicas}):
        model = pair()
        fully_shard(model[0])
        with pytest.raises(ModuleError, match=r"on other terms.*the same mesh, mp_policy and"):
            fully_shard(model[1], **given)


@ranks(2)
def test_values_written_between_two_calls(rank: int, size: int) -> None:
    """What is written to the original does not reach the shard, so it is refused."""
    model = pair()
    fully_shard(model[0])
    with torch.no_grad():
        model[1].weight.zero_()
    with pytest.raises(ModuleError, match="was written to since"):
        fully_shard(model[1])


@ranks(2)
def test_a_unit_that_ran_already(rank: int, size: int) -> None:
    model = pair()
    fully_shard(model[0])
    model[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(ModuleError, match="took already and ran"):
        fully_shard(model[1])


@ranks(2)
def test_copies_are_not_tied(rank: int, size: int) -> None:
    """By identity: a copy of a module that waits to be sharded is a module of its own."""
    model = pair()
    fully_shard(model[0])
    for other in (copy.deepcopy(model[1]), pickle.loads(pickle.dumps(model[1]))):
        fully_shard(other)
        assert isinstance(other.weight, DTensor)
        assert other.weight is not model[0].weight
        other(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.grad is None


@ranks(2)
def test_ignored_where_it_is_met_again(rank: int, size: int) -> None:
    """Code that ignores it keeps the original."""
    model = pair()
    original = model[1].weight
    fully_shard(model[0])
    fully_shard(model[1], ignored_params={original})
    assert model[1].weight is original


class Twice(nn.Module):
    """Two halves that contain the same module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Linear(3, 3)
        self.first, self.second = (nn.Sequential(inner, nn.Linear(3, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@ranks(2)
@pytest.mark.parametrize("way", ["inner", "list"])
def test_one_module_in_two_units(rank: int, size: int, way: str) -> None:
    refused: Any = Twice()
    fully_shard(refused.first)
    for _ in range(2):  # at rest and gathered
        pattern = r"module '0' \(Linear\) is in two units: unit '.+' took '0.weight' before"
        with pytest.raises(ModuleError, match=pattern):
            fully_shard(refused.second)
        refused.first.unshard()

    ours, reference = Twice(), Twice()
    halves: list[Any] = [ours.first, ours.second]
    if way == "list":
        fully_shard(halves)
    else:
        fully_shard(ours.first[0])
        for half in halves:
            fully_shard(half)
    fully_shard(ours)
    ours(torch.ones(2, 3)).sum().backward()
    reference(torch.ones(2, 3)).sum().backward()
    for sharded, plain in zip(ours.parameters(), reference.parameters(), strict=True):
        assert sharded.grad is not None
        torch.testing.assert_close(full(sharded.grad), plain.grad)
