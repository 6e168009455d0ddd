"""A plugin judged on the device, for ``polyshard_testing``: order, lifetime, waits of the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyshard_sim.building import missing_tools
from polyshard_sim.enabling import Mode, counters, reset_counters
from polyshard_sim.testing import MODES, Ranks
from polyshard_testing.cases import SmallModel
from polyshard_testing.runs import Factory, plugins_of

__all__ = ["Verdict", "judge", "missing_tools"]

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


def judge(factory: Factory) -> list[Verdict]:
    """Train on two ranks in each mode of the device, with the plugin of ``factory`` and without.

    The device is strict: memory is overwritten, in the order of its own stream, when it is freed.
    """
    return [_judged(mode, factory) for mode in MODES]


def _judged(mode: Mode, factory: Factory) -> Verdict:
    ranks = Ranks(2, mode=mode, strict=True)
    try:
        expected, before = ranks.run(train, None)[0]
        losses, waits = ranks.run(train, factory)[0]
    finally:
        ranks.close()
    return Verdict(mode, expected, losses, max(0, waits - before))


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
    targets = (torch.arange(8) % 7).to("sim")
    losses: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(8, 96, generator=generator).to("sim")
        reset_counters()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    waits = counters().host_waits
    return [float(loss) for loss in losses], waits
