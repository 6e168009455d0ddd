"""What plugins keep for a model is saved beside it, by rank, plugin and group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from samples.short import SavedFeedback
from torch import Tensor, nn
from toy_lifetimes import Lasting

from polyshard import (
    describe,
    fully_shard,
    load_plugin_state_dict,
    plugin_state_dict,
    stats,
)
from polyshard.errors import CheckpointError
from polyshard_testing import World, ranks


def build(*plugins: object) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0], plugins=plugins)
    return fully_shard(model, plugins=plugins)


@ranks(2)
def test_every_rank_saves_its_own_under_final_names(rank: int, size: int) -> None:
    model = build(Lasting())
    states = plugin_state_dict(model)
    assert list(states) == [f"rank{rank}of2.lasting.(root)", f"rank{rank}of2.lasting.0"]
    assert {state["rank"] for state in states.values()} == {rank}
    model(torch.ones(1, 4)).sum().backward()
    assert list(plugin_state_dict(model)) == list(states)


def without_outermost(*plugins: object) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for layer in model:
        fully_shard(layer, plugins=plugins)
    return model


@ranks(2)
def test_models_of_several_roots_keep_all_of_it(rank: int, size: int) -> None:
    """Each layer becomes a root by itself, and each names its group ``(root)``."""
    model = without_outermost(SavedFeedback())
    before = list(plugin_state_dict(model))
    assert len(before) == len(set(before)) == 2
    steps(model, rank, 2)
    saved = plugin_state_dict(model)
    assert list(saved) == before
    again = without_outermost(SavedFeedback())
    load_plugin_state_dict(again, saved)
    for key, state in plugin_state_dict(again).items():
        for name, value in state.items():
            assert torch.equal(value, saved[key][name])
    assert stats(model).bytes_sent == sum(stats(layer).bytes_sent for layer in model)


@ranks(2)
def test_compiled_models_have_the_keys_of_plain_ones(rank: int, size: int) -> None:
    model = build(Lasting())
    wrapped: Any = torch.compile(model, backend="eager")
    assert list(plugin_state_dict(wrapped)) == list(plugin_state_dict(model))


@ranks(2)
def test_plans_of_several_roots_are_those_of_the_run(rank: int, size: int) -> None:
    model = without_outermost()
    before = describe(model)
    steps(model, rank, 1)
    assert before.step_bytes == describe(model).step_bytes == stats(model).bytes_sent


@ranks(2)
def test_plugins_choose_their_groups(rank: int, size: int) -> None:
    assert plugin_state_dict(build(Lasting("Conv"))) == {}
    assert plugin_state_dict(build()) == {}


@ranks(2)
def test_state_of_others_is_refused_alike(rank: int, size: int) -> None:
    model = build(Lasting())
    states = plugin_state_dict(model)
    other = {key.replace("of2", "of4"): state for key, state in states.items()}
    with pytest.raises(CheckpointError, match=r"no 'rank\dof2\.lasting\.\(root\)', .*only 'rank"):
        load_plugin_state_dict(model, other)
    with pytest.raises(KeyError) as caught:
        load_plugin_state_dict(model, {key: {} for key in states})
    note = f"raised in load_state_dict of the plugin state 'rank{rank}of2.lasting.(root)'"
    assert caught.value.__notes__ == [note]


def steps(model: nn.Module, rank: int, count: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def resumed(rank: int, size: int, folder: Path) -> None:
    model = build(SavedFeedback())
    steps(model, rank, 2)
    dcp.save(
        {"model": model.state_dict(), "plugins": plugin_state_dict(model)}, checkpoint_id=folder
    )
    steps(model, rank, 2, first=2)
    expected = weights(model)

    def loaded(with_plugins: bool) -> list[Tensor]:
        again = build(SavedFeedback())
        state = {"model": again.state_dict(), "plugins": plugin_state_dict(again)}
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        if with_plugins:
            load_plugin_state_dict(again, state["plugins"])
        else:
            for held in plugin_state_dict(again).values():
                held["value"].zero_()
        steps(again, rank, 2, first=2)
        return weights(again)

    assert all(map(torch.equal, loaded(True), expected))
    assert not all(map(torch.equal, loaded(False), expected))
    dist.barrier()


def test_training_goes_on_as_it_would_have(world2: World, tmp_path: Path) -> None:
    world2.run(resumed, tmp_path / "checkpoint")
