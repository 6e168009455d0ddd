"""Plugins that only look on may differ between ranks; all others may not."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_lifetimes import Lasting
from toy_observers import Watcher, Watching
from toy_planning import Signing

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import PlanMismatchError
from polyshard.plugins import hookspecs
from polyshard.plugins.member import RANKS_MAY_DIFFER
from polyshard.plugins.stack import build_stack
from polyshard.plugins.validation import hook_arguments
from polyshard_testing import ranks


@dataclass(frozen=True, eq=False)
class Tracing(Plugin):
    """Watches, into a file that is another one on each rank."""

    name = "tracing"

    path: str = ""
    watcher: Watcher = field(default_factory=Watcher, repr=False)

    @hookimpl
    def polyshard_observer(self) -> Watcher:
        return self.watcher


def trained(plugins: list[object], rank: int) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0], plugins=plugins)
    fully_shard(model, plugins=plugins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 4), 1.0 + rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [p.detach().full_tensor() for p in model.parameters()]


@ranks(2, 3)
def test_an_observer_on_one_rank_only_trains(rank: int, size: int) -> None:
    watching = Watching()
    model, found = trained([] if rank else [watching], rank)
    _, expected = trained([], rank)
    assert all(map(torch.equal, found, expected))
    assert ("plugin watching 0" in str(describe(model))) is (rank == 0)
    assert watching.watcher.events.count("step end") == (0 if rank else 3)


@ranks(2)
def test_observers_may_have_settings_of_their_own(rank: int, size: int) -> None:
    plugin = Tracing(f"trace-{rank}.json")
    model, _ = trained([plugin, Lasting("" if rank else "elsewhere")], rank)
    (first, _) = describe(model).groups
    assert first.roles.plugins == ()
    assert f"plugin tracing 0 (path='trace-{rank}.json')" in str(describe(model))
    assert not any("tracing" in line for line in first.lines())


class Changing(Tracing):
    """Watches, and changes models as well."""

    name = "changing"

    @hookimpl
    def polyshard_prepare_model(self, module: nn.Module) -> None:
        """Nothing that anybody could know."""


@ranks(2)
def test_plugins_that_do_more_are_compared(rank: int, size: int) -> None:
    stacks: list[list[object]] = [[Changing(f"{rank}")], [Signing()] if rank else []]
    for plugins in stacks:
        with pytest.raises(PlanMismatchError, match=r"plugin (changing|signing)"):
            trained(plugins, rank)


def test_lines_are_parted_in_plugin_order() -> None:
    stack = build_stack([Watching(), Changing("x"), Tracing("y")])
    assert [line.split()[0] for line in stack.lines()] == ["changing", "tracing", "watching"]


@pytest.mark.parametrize("hook", list(hook_arguments()))
def test_specifications_say_which_hooks_may_differ(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    said = text.partition("\nRanks: ")[2]
    assert said.startswith(("may differ", "may call it")) is (hook in RANKS_MAY_DIFFER)
