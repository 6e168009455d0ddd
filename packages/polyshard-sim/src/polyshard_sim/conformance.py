"""A plugin judged on the device, for ``polyshard_testing``: order, lifetime, waits of the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyshard_sim.building import missing_tools
from polyshard_sim.enabling import Mode, counters, reset_counters
from polyshard_sim.testing import MODES, Ranks
from polyshard_testing.cases import SmallModel
from polyshard_testing.runs import Factory, plugins_of

__all__ = ["Judge", "Verdict", "missing_tools"]

STEPS = 4


@dataclass(frozen=True)
class Verdict:
    """What a plugin did in one mode of the device, on rank 0."""

    mode: Mode
    expected: list[float]
    """Losses without the plugin."""
    losses: list[float]
    host_waits: int
    """Times that the host waited for the device in the last step, beyond those without it."""

    def is_close(self, closeness: float) -> bool:
        """Whether losses are the expected ones: bitwise with ``closeness`` 0."""
        return all(
            math.isclose(one, other, rel_tol=closeness, abs_tol=closeness)
            for one, other in zip(self.losses, self.expected, strict=True)
        )


class Judge:
    """Two ranks in each mode of the device, kept from plugin to plugin.

    The device is strict: memory is overwritten, in the order of its own stream, when it is freed.
    """

    def __init__(self) -> None:
        """Ranks start with the first plugin."""
        self._ranks = {mode: Ranks(2, mode=mode, strict=True) for mode in MODES}
        self._expected: dict[Mode, tuple[list[float], int]] = {}

    def verdicts(self, factory: Factory) -> Iterator[Verdict]:
        """Train in each mode, with the plugin of ``factory`` and without."""
        for mode, ranks in self._ranks.items():
            if mode not in self._expected:
                self._expected[mode] = ranks.run(train, None)[0]
            expected, before = self._expected[mode]
            losses, waits = ranks.run(train, factory)[0]
            yield Verdict(mode, expected, losses, max(0, waits - before))

    def close(self) -> None:
        """End the ranks."""
        for ranks in self._ranks.values():
            ranks.close()


def train(rank: int, size: int, factory: Factory | None) -> tuple[list[float], int]:
    """Losses of some steps, and how often the host waited in the last one."""
    from polyshard import fully_shard

    del size
    model = SmallModel().to("sim")
    plugins = [] if factory is None else plugins_of(factory)
    for part in (model.first, model.second, model):
        fully_shard(part, plugins=plugins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator("cpu").manual_seed(rank)
    targets = (torch.arange(8, device="cpu") % 7).to("sim")
    losses: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(8, 96, generator=generator, device="cpu").to("sim")
        reset_counters()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    waits = counters().host_waits
    return [float(loss) for loss in losses], waits
