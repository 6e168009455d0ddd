"""Observers, right and wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import Observer, Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo
from samples.verdict import Right, Samples, Wrong, variant


class Counting(Observer):
    """Adds up bytes."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.sent[group] += payload_bytes


class Around(Observer):
    """Passes some of what it sees to another observer."""

    def __init__(self) -> None:
        self.inner = Counting()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.inner.on_unshard(group, payload_bytes)


class Watching(Plugin):
    name = "sample"
    observer: ClassVar[Any] = Counting

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer | None:
        made: Observer | None = self.observer() if self.observer else None
        return made


# Wrong -------------------------------------------------------------------------------------------


class _Raising(Observer):
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        raise ValueError(group)


class _Hoarding(Observer):
    """Keeps more with every step."""

    kept: ClassVar[list[torch.Tensor]] = []

    def on_step_end(self) -> None:
        self.kept.append(torch.ones(1 << 23))


class _Stranger:
    """Has some of the methods, and is no observer."""

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        """Nothing."""


class Unmade(Watching):
    """Gives a class where an object is asked for."""

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Any:
        return Counting


class Meddling(Watching):
    """Changes the weights that it should watch."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    @hookimpl
    def polyshard_prepare_model(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.modules.append(module)

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer:
        modules = self.modules

        class Decay(Observer):
            def on_step_end(self) -> None:
                with torch.no_grad():
                    for parameter in modules[-1].parameters():
                        parameter.mul_(0.5)

        return Decay()


SAMPLES = Samples(
    right=[
        Right(Watching),
        Right(variant(Watching, "Quiet", observer=Observer)),
        Right(variant(Watching, "Wrapping", observer=Around)),
        Right(variant(Watching, "Abstaining", observer=None)),
    ],
    wrong=[
        Wrong(variant(Watching, "Raising", observer=_Raising), "test_two_ranks_train_like_without"),
        Wrong(variant(Watching, "Hoarding", observer=_Hoarding), "test_memory_is_released"),
        Wrong(
            variant(Watching, "Strange", observer=_Stranger),
            "test_answers_are_the_same_on_every_rank",
        ),
        Wrong(Unmade, "test_answers_are_the_same_on_every_rank"),
        Wrong(Meddling, "test_two_ranks_train_like_without"),
    ],
)
