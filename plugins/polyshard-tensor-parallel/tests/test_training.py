"""Training on data-parallel and tensor-parallel axes at once, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tp_models import Curve, full, loss_of, mean_over, meshes, shard_blocks, tiny, tokens_for, train

from polyshard.testing import World
from polyshard_tensor_parallel import TensorParallel, demo_plan

LAYOUTS = {"fsdp2 x tp2": (2, 2, 0), "hsdp2x1 x tp2": (1, 2, 2), "fsdp1 x tp4": (1, 4, 0)}


def on_all_axes(
    rank: int, size: int, layout: str, steps: int, tied: bool, sequence: bool
) -> tuple[int, Curve, dict[str, torch.Tensor]]:
    dp, tp, replicas = LAYOUTS[layout]
    mesh = meshes(dp, tp, replicas)
    plugin = TensorParallel(demo_plan(sequence_parallel=sequence), mesh=mesh["tp"])
    model = tiny(tied=tied)
    plugin.apply(model)
    data: Any = mesh["replicas", "dp"] if replicas else mesh["dp"]
    shard_blocks(model, mesh=data, plugins=[plugin])
    part = rank // tp
    curve = train(model, [part], steps)
    values = {name: full(value.detach()) for name, value in model.named_parameters()}
    return part, curve, values


def one_process(steps: int, tied: bool, parts: int) -> tuple[Curve, dict[str, torch.Tensor]]:
    model = tiny(tied=tied)
    curve = train(model, range(parts), steps)
    return curve, {name: value.detach() for name, value in model.named_parameters()}


def compare(
    found: list[tuple[int, Curve, dict[str, torch.Tensor]]],
    expected: tuple[Curve, dict[str, torch.Tensor]],
    tolerance: float,
) -> None:
    by_part = {part: curve.losses for part, curve, _ in found}
    losses = mean_over(by_part.values())
    torch.testing.assert_close(losses, expected[0].losses, rtol=tolerance, atol=tolerance)
    for _, curve, values in found:
        torch.testing.assert_close(curve.norms, expected[0].norms, rtol=tolerance, atol=tolerance)
        for name, value in expected[1].items():
            torch.testing.assert_close(values[name], value, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_same_as_one_process(world4: World, layout: str, tied: bool) -> None:
    dp, _, replicas = LAYOUTS[layout]
    found = world4.run(on_all_axes, layout, 3, tied, False)
    compare(found, one_process(3, tied, dp * max(1, replicas)), 1e-4)
