"""Tensors that the user holds follow the model, or keep what they held: as with torch's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from toy_models import build, full, loss_of, shard, tokens_for, train
from toy_twins import same_gradients

from polyshard import fully_shard
from polyshard.errors import ModuleError
from polyshard_testing import World, raises_in_step, ranks

ENGINES = ("torch", "polyshard")
SMALL = {"width": 24, "hidden": 30, "layers": 2}


def sharded(engine: str, seed: int = 0, **kwargs: Any) -> Any:
    how: Any = fully_shard if engine == "polyshard" else torch_fully_shard
    return shard(build(seed, **SMALL), how, **kwargs)


def sharded_on_meta(engine: str) -> Any:
    with torch.device("meta"):
        return sharded(engine)


class Scaled(nn.Module):
    """Its scale has one row, which rank 0 holds; ``linear`` has one for every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 6))
        self.first, self.linear = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.first(x) * self.scale)
        return out


@pytest.mark.parametrize("holders", [(0,), (0, 1)])
@ranks(2)
def test_ranks_may_differ_in_which_tensors_they_hold(
    rank: int, size: int, holders: tuple[int, ...]
) -> None:
    """A part of the model is loaded while a state dict is held; where all do, one has no row."""
    torch.manual_seed(0)
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    held = model.state_dict() if rank in holders else {}
    with torch.no_grad():
        doubled = 2 * model.linear.weight.detach()
        plain.linear.weight.mul_(2)
    model.load_state_dict({"linear.weight": doubled}, strict=False, assign=True)
    for each in (model, plain):
        each(torch.ones(2, 6)).sum().backward()
    same_gradients(model, plain)
    assert set(held) == (set(dict(model.named_parameters())) if rank in holders else set())


def clones(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def changed(engine: str, how: str) -> Any:
    """A sharded model whose parameters changed hands before the first forward."""
    source = sharded(engine)
    if how in ("to_empty", "assign", "pieces"):
        model = sharded_on_meta(engine)
        if how == "to_empty":
            model.to_empty(device=torch.get_default_device())
            model.load_state_dict(source.state_dict())
            return model
        pieces = [clones(source)]
        if how == "pieces":
            pieces = [{name: value} for name, value in pieces[0].items()]
        for piece in pieces:
            model.load_state_dict(piece, strict=False, assign=True)
        return model
    if how == "double":
        return source.double()
    if how == "swapped":
        with swapping():
            return source.double()
    if how == "parent":  # a plain module around it
        nn.ModuleList([source]).double()
        return source
    assert how == "afterwards"  # engines are set up, then parameters change
    loss_of(source, tokens_for(5, 0)).backward()
    source.zero_grad()
    source.load_state_dict(clones(sharded(engine, 1)), assign=True)
    return source


HOWS = ("to_empty", "assign", "pieces", "double", "swapped", "parent", "afterwards")


def follows(rank: int, size: int, engine: str, how: str) -> None:
    """The shape of torchtitan's checkpoint manager: the state dict is taken once, early."""
    model = changed(engine, how)
    cached = model.state_dict()
    detached = {name: p.detach() for name, p in model.named_parameters()}
    if how != "afterwards":
        expected = build(0, **SMALL).state_dict()
        for name, value in cached.items():
            assert torch.equal(full(value).float(), expected[name]), name
    before = {name: value.to_local().clone() for name, value in cached.items()}
    train(model, [tokens_for(step, rank) for step in range(2)])
    live = model.state_dict()
    for name, value in live.items():
        assert torch.equal(cached[name].to_local(), value.to_local()), name
        assert torch.equal(detached[name].to_local(), value.to_local()), name
    assert any(not torch.equal(v.to_local(), before[n]) for n, v in live.items()), "it has trained"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_cached_state_dict_follows_the_model(world2: World, engine: str, how: str) -> None:
    world2.run(follows, engine, how)


@pytest.mark.parametrize("how", ["to_empty", "pieces", "double"])
def test_on_one_rank_and_with_empty_shards(world1: World, world3: World, how: str) -> None:
    world1.run(follows, "polyshard", how)
    world3.run(follows, "polyshard", how)


@ranks(2)
def test_a_state_dict_taken_between_pieces(rank: int, size: int) -> None:
    """A state dict taken while only some parameters have values follows those."""
    model, source = sharded_on_meta("polyshard"), clones(sharded("polyshard"))
    names = list(source)
    early: dict[str, Any] = {}
    for name in names:
        model.load_state_dict({name: source[name]}, strict=False, assign=True)
        early[name] = model.state_dict()[name]
    train(model, [tokens_for(step, rank) for step in range(2)])
    for name, value in model.state_dict().items():
        assert torch.equal(early[name].to_local(), value.to_local()), name


@pytest.mark.parametrize("engine", ENGINES)
@ranks(2)
def test_what_was_swapped_out_is_kept(rank: int, size: int, engine: str) -> None:
    """Other weights swapped in by reference and out again: the first ones are still there."""
    model, other = sharded(engine, 0), clones(sharded(engine, 1))
    first, second = build(0, **SMALL), build(1, **SMALL)
    tokens = tokens_for(0, 0)
    kept = model.state_dict()
    for _ in range(2):
        model.load_state_dict(other, assign=True)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, tokens), loss_of(second, tokens))
        for name, value in first.state_dict().items():
            assert torch.equal(full(kept[name]), value), name
        model.load_state_dict(kept, assign=True)
        kept = model.state_dict()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, tokens), loss_of(first, tokens))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step_between", [False, True])
@ranks(1, 2)
def test_one_parameter_is_replaced(rank: int, size: int, engine: str, step_between: bool) -> None:
    """One parameter of a group is replaced while a state dict is held of all."""
    model, other = sharded(engine, 0), clones(sharded(engine, 1))
    if step_between:
        train(model, [tokens_for(9, rank)])
    cached = model.state_dict()
    old = {name: value.to_local().clone() for name, value in cached.items()}
    name = "blocks.0.up.weight"
    model.load_state_dict({name: other[name]}, strict=False, assign=True)
    again = model.state_dict()
    assert torch.equal(again[name].to_local(), other[name].to_local())
    train(model, [tokens_for(step, rank) for step in range(2)])
    live = model.state_dict()
    for key, value in live.items():
        assert torch.equal(again[key].to_local(), value.to_local()), key
        expected = old[key] if key == name else value.to_local()
        assert torch.equal(cached[key].to_local(), expected), key
        if key != "blocks.0.up.weight" and value.to_local().numel():
            assert not torch.equal(value.to_local(), old[key]), f"'{key}' was trained"


@ranks(1, 2)
def test_a_model_replaced_in_part_trains_right(rank: int, size: int) -> None:
    """The values that are gathered are those of the parameters, wherever they rest."""
    model, reference = sharded("polyshard", 0), build(0, **SMALL)
    kept = model.state_dict()
    name = "blocks.0.up.weight"
    fresh, value = clones(sharded("polyshard", 1)), build(1, **SMALL).state_dict()[name]
    model.load_state_dict({name: fresh[name]}, strict=False, assign=True)
    reference.load_state_dict({name: value}, strict=False)
    batches = [tokens_for(step, 0) for step in range(3)]  # the same for all ranks
    torch.testing.assert_close(train(model, batches).losses, train(reference, batches).losses)
    assert len(kept) == len(model.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
@ranks(2)
def test_memory_shared_with_processes(rank: int, size: int, engine: str) -> None:
    """Memory that is shared with another process is what continues being trained."""
    model = sharded(engine)
    train(model, [tokens_for(9, rank)])
    parameter: Any = model.blocks[0].up.weight
    outside = parameter.detach().to_local().share_memory_()
    before = outside.clone()
    expected = train(sharded(engine), [tokens_for(9, rank)])
    assert expected.losses
    train(model, [tokens_for(step, rank) for step in range(2)])
    assert torch.equal(outside, model.blocks[0].up.weight.detach().to_local())
    assert not torch.equal(outside, before)
    reference = sharded(engine)
    train(reference, [tokens_for(9, rank)])
    train(reference, [tokens_for(step, rank) for step in range(2)])
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.detach().to_local(), b.detach().to_local())


@ranks(2)
def test_a_plain_child_is_converted(rank: int, size: int) -> None:
    """``to`` of a plain module inside a unit passes no method of ours."""
    model: Any = sharded("polyshard")
    reference: Any = build(0, **SMALL)
    with torch.no_grad():
        loss_of(model, tokens_for(0, 0))
    for whole in (model, reference):
        child: Any = whole.blocks[0].up
        child.to_empty(device=torch.get_default_device())
        with torch.no_grad():
            for parameter in child.parameters():
                parameter.fill_(0.01)
    with torch.no_grad():
        ours, expected = loss_of(model, tokens_for(0, 0)), loss_of(reference, tokens_for(0, 0))
    torch.testing.assert_close(ours, expected)
    model.blocks[0].up.double()
    for _ in range(2):  # not only once
        with raises_in_step(ModuleError, r"converted to different dtypes.*up\.weight"):
            model(tokens_for(0, 0))
        model.reset_iter_state()
    model.blocks[0].double()
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):  # the rest is float32 still
        model(tokens_for(0, 0))
    model.reset_iter_state()
    model.double()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, tokens_for(0, 0)), expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens))
        return out


@ranks(2)
def test_tied_parameters_stay_tied(rank: int, size: int) -> None:
    """``assign`` gives each module that shares a parameter one of its own."""
    model: Any = fully_shard(Tied())
    source: dict[str, Any] = {n: v.clone() * 2 for n, v in model.state_dict().items()}
    model.load_state_dict(source, assign=True)
    assert model.head.weight is model.table.weight
    state = model.state_dict()
    (model(torch.arange(4)).sum()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert isinstance(model.head.weight, DTensor)
    for value in state.values():
        assert torch.equal(value.to_local(), model.table.weight.detach().to_local())
