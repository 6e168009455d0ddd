"""Unsharded parameters after they were freed: an error as in torch, never zeros or old values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from polyshard import describe, fully_shard, stats
from polyshard_testing import ranks

WIDTHS = (32, 768)
"""Of square matrices: below and above what is kept in memory that moves."""


def linears(width: int, shards: Any, kept: list[Tensor] | None = None) -> Any:
    """``kept`` gets the first weight as a hook sees it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    if kept is not None:
        model[0].register_forward_hook(lambda m, a, o: kept.append(m.weight.detach()))
    for layer in model:
        shards(layer)
    shards(model)
    return model


@pytest.mark.parametrize("width", WIDTHS)
@ranks(2)
def test_a_weight_kept_from_a_hook(rank: int, size: int, width: int) -> None:
    x = torch.ones(2, width)
    for shards in (torch_fully_shard, fully_shard):
        kept: list[Tensor] = []
        model = linears(width, shards, kept)
        with torch.no_grad():
            model(x)
        with pytest.raises(RuntimeError, match=r"data|out of bounds"):
            x @ kept[0].t()
        if shards is fully_shard:  # torch's process would end here
            for access in (kept[0].sum, kept[0].clone, kept[0].zero_, lambda w=kept[0]: w + 1):
                with pytest.raises(RuntimeError, match="data pointer"):
                    access()
        model[0].unshard()
        assert (x @ kept[0].t()).abs().sum() > 0, "gathered again, it is what it was"


@pytest.mark.parametrize("width", WIDTHS)
@ranks(2)
def test_backward_that_needs_what_was_not_gathered(rank: int, size: int, width: int) -> None:
    """Told not to gather for backward where autograd needs the weight."""
    for shards in (torch_fully_shard, fully_shard):
        model = linears(width, shards)
        model[1].set_unshard_in_backward(False)
        x = torch.ones(2, width, requires_grad=True)
        with pytest.raises(RuntimeError):  # a late rank's forward may refuse to start
            model(x).sum().backward()
        assert x.grad is None
    model.reset_iter_state()
    model[1].set_unshard_in_backward(True)
    model(x).sum().backward()
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    torch.manual_seed(0)
    for layer in plain:
        layer.reset_parameters()  # type: ignore[operator]
    expected = torch.ones(2, width, requires_grad=True)
    plain(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


@pytest.mark.parametrize("width", WIDTHS)
@ranks(2)
def test_an_embedding_is_not_gathered_for_backward(rank: int, size: int, width: int) -> None:
    """What the setting is for: an embedding's backward does not read the table."""
    gradients = []
    for shards in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Embedding(width, width), nn.Linear(width, 1))
        for layer in model:
            shards(layer)
        shards(model)
        model[0].set_unshard_in_backward(False)
        model(torch.tensor([1, 2, 3])).sum().backward()
        gradients.append(model[0].weight.grad.full_tensor())
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()
    before = stats(model).bytes_sent
    model(torch.tensor([1, 2, 3])).sum().backward()
    assert stats(model).bytes_sent - before == describe(model).step_bytes
