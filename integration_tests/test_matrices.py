"""Optimizers of whole matrices beside gradients that travel quantized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_testing import ranks

pytest.importorskip("polyshard_optimizers")
pytest.importorskip("polyshard_quantized")

from small_model import loss_of

from polyshard_optimizers import MatrixOptimizer
from polyshard_quantized import Exclusions, Int8Block, QuantizedComm

SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}


def sharded(*plugins: Any) -> Any:
    torch.manual_seed(0)
    # 51 rows: the second rank has fewer than the first
    model: Any = LanguageModel(ModelSettings(width=32, layers=2, heads=4, hidden=51, sequence=8))
    for block in model.blocks:
        fully_shard(block, plugins=plugins)
    return fully_shard(model, plugins=plugins)


def quantized() -> QuantizedComm:
    return QuantizedComm(gradients=Int8Block(64), exclude=Exclusions(min_numel=0))


def whole_gradients(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    found: dict[str, Any] = {name: model.get_parameter(name).grad for name in names}
    return {name: gradient.full_tensor() for name, gradient in found.items()}


@ranks(2)
def test_matrices_of_quantized_gradients_that_are_summed_in_rows(rank: int, size: int) -> None:
    """Owners step by the sums that everybody sees, as one process does that is given them."""
    plugin = MatrixOptimizer(torch.optim.Muon, gradients="rows", **SETTINGS)
    model = sharded(quantized(), plugin)
    optimizer = plugin.optimizer(model)
    rest = {id(parameter) for parameter in plugin.rest(model)}
    names = [name for name, p in model.named_parameters() if id(p) not in rest]
    assert names == [n for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    alone = {n: nn.Parameter(model.get_parameter(n).full_tensor().detach()) for n in names}
    muon = torch.optim.Muon(alone.values(), **SETTINGS)
    others = [sharded(quantized()), sharded()]
    for each in (model, *others):
        loss_of(each, 0, rank).backward()
    found, same, exact = (whole_gradients(m, names) for m in (model, *others))
    assert all(torch.equal(found[name], same[name]) for name in names)
    assert not any(torch.equal(found[name], exact[name]) for name in names)
    for step in range(1, 4):
        for name, gradient in whole_gradients(model, names).items():
            alone[name].grad = gradient
        optimizer.step()
        muon.step()
        for name, expected in alone.items():
            weights = model.get_parameter(name).full_tensor()
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        model.zero_grad()
        loss_of(model, step, rank).backward()
