"""What is started early, seen from a storage that logs and from an observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from polyshard import Plugin, fully_shard, hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, Observer, StorageFactory
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import World


class Logging(DeviceStorage):
    """On the device like any other; says when it is told of a gather, and when one reads it."""

    prefetch_units = 1

    def __init__(self, log: list[str], index: int) -> None:
        super().__init__()
        self._log, self._index = log, index

    @override
    def prefetch(self) -> None:
        self._log.append(f"told {self._index}")

    @override
    def fetch(self) -> None:
        self._log.append(f"read {self._index}")


class LoggingFactory(StorageFactory):
    name, settings = "logging", ""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._count = 0

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Logging:
        self._count += 1
        return Logging(self.log, self._count)


class LoggingPlugin(Plugin):
    """Storages are numbered as units are made."""

    name = "logging"

    def __init__(self) -> None:
        self.factory = LoggingFactory()

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> LoggingFactory:
        return self.factory


class Calls(nn.Module):
    """Units called in an order given with the input, with a parameter of its own."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(2, 2) for _ in range(units))
        self.scale = nn.Parameter(torch.ones(2))

    @override
    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.units[index](x)
        return x * self.scale


def model_and_log(units: int = 3) -> tuple[Any, list[str]]:
    """Units 1 to ``units`` below a root whose storage has the next number."""
    plugin = LoggingPlugin()
    model = Calls(units)
    for unit in model.units:
        fully_shard(unit, plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    return model, plugin.factory.log


def evaluates(rank: int, size: int) -> None:
    model, log = model_and_log()
    x = torch.ones(1, 2)
    found = []
    with torch.no_grad():
        for _ in range(3):
            log.clear()
            model(x, (0, 1, 2))
            found.append(list(log))
    assert found[0] == ["read 4", "read 1", "read 2", "read 3"], "nobody knows what comes"
    assert found[1] == ["read 4", "told 1", "read 1", "told 2", "read 2", "told 3", "read 3"]
    assert found[2] == found[1], "a loop that only evaluates is told as often as it runs"


def test_evaluation_tells_storages_too(world2: World) -> None:
    world2.run(evaluates)


def departs(rank: int, size: int) -> None:
    """Root, 2, 1, 3 after root, 1, 2, 3 was recorded: what was foreseen wrongly is read once."""
    model, log = model_and_log()
    x = torch.ones(1, 2)
    with torch.no_grad():
        model(x, (0, 1, 2))
        log.clear()
        model(x, (1, 0, 2))
        assert log == ["read 4", "told 1", "read 1", "read 2", "read 3"]
        log.clear()
        model(x, (1, 0, 2))
        assert log == ["read 4", "told 2", "read 2", "told 1", "read 1", "told 3", "read 3"]


def test_nobody_is_told_of_a_record_that_was_departed_from(world2: World) -> None:
    world2.run(departs)


def goes_back(rank: int, size: int) -> None:
    """Backward follows the notes of its own forwards, whatever ran last time."""
    model, log = model_and_log()
    x = torch.ones(1, 2)
    model(x, (0, 1, 2)).sum().backward()
    out = model(x, (2, 1, 0))
    log.clear()
    out.sum().backward()
    reads = [line for line in log if line.startswith("read")]
    assert reads == ["read 1", "read 2", "read 3"], log
    assert log.index("told 3") < log.index("read 3")


def test_backward_tells_by_its_own_forward(world2: World) -> None:
    world2.run(goes_back)


def recomputes(rank: int, size: int) -> None:
    """A forward recomputed in backward, from outside of the root, leaves the record as it was."""
    model, log = model_and_log()
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        log.clear()
        out: Any = checkpoint(model, x, (0, 1, 2), use_reentrant=True)
        forward = list(log)
        out.sum().backward()
    assert forward == ["read 4", "told 1", "read 1", "told 2", "read 2", "told 3", "read 3"]


def test_a_recomputed_forward_is_no_record(world2: World) -> None:
    world2.run(recomputes)


class Counting(Observer):
    """Counts reductions that started, and those it hears are in place."""

    def __init__(self) -> None:
        self.started, self.placed = 0, 0

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.started += 1

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self.placed += 1

    def on_unshard(self, group: str, payload_bytes: int) -> None: ...
    def on_unsharded(self, group: str, wait_seconds: float) -> None: ...
    def on_reshard(self, group: str) -> None: ...
    def on_step_end(self) -> None: ...


class CountingPlugin(Plugin):
    name = "counting"

    def __init__(self) -> None:
        self.counting = Counting()

    @hookimpl
    def polyshard_observer(self) -> Counting:
        return self.counting


def counts(rank: int, size: int) -> None:
    plugin = CountingPlugin()
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model:
        fully_shard(layer, plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    for is_last in (False, False, True):
        model.set_is_last_backward(is_last)
        model(torch.ones(1, 2)).sum().backward()
    assert (plugin.counting.started, plugin.counting.placed) == (6, 6)


def test_observers_hear_once_of_every_reduction(world2: World) -> None:
    """Of micro-batches before the last one too, where nothing had to wait for it."""
    world2.run(counts)
