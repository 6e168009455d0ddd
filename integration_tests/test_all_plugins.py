"""Every subset of the plugins of this repository on four ranks, against one process."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import clip_grad_norm_, describe, fully_shard, stats
from polyshard.demo.model import LanguageModel, ModelSettings
from polyshard.testing import World

pytest.importorskip("polyshard_tensor_parallel")
pytest.importorskip("polyshard_quantized")
pytest.importorskip("polyshard_offload")

SEQUENCE, STEPS = 16, 4
NAMES = ("tensor_parallel", "quantized", "offload")
SUBSETS = [subset for count in range(4) for subset in combinations(NAMES, count)]


def built() -> LanguageModel:
    torch.manual_seed(0)
    settings = ModelSettings(width=64, layers=2, heads=4, hidden=192, sequence=SEQUENCE)
    return LanguageModel(settings)


def tokens_for(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(0, 256, (2, SEQUENCE + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: Any, parts: list[int]) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for part in parts:
            loss = loss_of(model, tokens_for(step, part)) / len(parts)
            loss.backward()
            total += loss.item()
        norms.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def trained(rank: int, size: int, subset: tuple[str, ...]) -> tuple[int, list[float], list[float]]:
    from polyshard_offload import Offload
    from polyshard_quantized import Int8Block, QuantizedComm
    from polyshard_tensor_parallel import TensorParallel, demo_plan

    model = built()
    plugins: list[object] = []
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    if "tensor_parallel" in subset:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel = TensorParallel(demo_plan(), mesh=mesh["tp"])
        tensor_parallel.apply(model)
        plugins.append(tensor_parallel)
    if "quantized" in subset:
        plugins.append(QuantizedComm(gradients=Int8Block()))
    offload = Offload(params="host", grads="host", optimizer="host")
    if "offload" in subset:
        plugins.append(offload)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], plugins=plugins)
    fully_shard(model, mesh=mesh["dp"], plugins=plugins)
    text = str(describe(model))
    assert all(name in text for name in subset)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if "offload" in subset:
        optimizer = offload.wrap(optimizer)
    part = mesh["dp"].get_local_rank()
    losses, norms = train(model, optimizer, [part])
    model.reshard()  # type: ignore[operator]
    predicted, before = describe(model).step_bytes, stats(model).bytes_sent
    loss_of(model, tokens_for(0, part)).backward()
    assert stats(model).bytes_sent - before == predicted
    return part, losses, norms


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "+".join(subset) or "none")
def test_any_plugins_together_train_like_one_process(
    world4: World, subset: tuple[str, ...]
) -> None:
    found = world4.run(trained, subset)
    parts = sorted({part for part, _, _ in found})
    model = built()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), parts)
    by_part = {part: losses for part, losses, _ in found}
    mean = [sum(column) / len(parts) for column in zip(*by_part.values(), strict=True)]
    tolerance = 1e-2 if "quantized" in subset else 1e-4
    torch.testing.assert_close(mean, expected[0], rtol=tolerance, atol=tolerance)
    wide = 5e-2 if "quantized" in subset else 1e-4
    for _, _, norms in found:
        torch.testing.assert_close(norms, expected[1], rtol=wide, atol=wide)
