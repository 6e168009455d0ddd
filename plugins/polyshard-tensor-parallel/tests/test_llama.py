"""``transformers`` Llama with the ready-made plan, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tp_models import Curve, mean_over, meshes, train

from polyshard import fully_shard
from polyshard.errors import SettingError
from polyshard_tensor_parallel import TensorParallel, llama_plan
from polyshard_tensor_parallel.plans.checking import check
from polyshard_testing import World

transformers: Any = pytest.importorskip("transformers")


def llama(*, tied: bool = False) -> Any:
    """Four heads that share two keys and values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def trained(rank: int, size: int, steps: int, tied: bool) -> tuple[int, Curve]:
    mesh = meshes(2, 2)
    model = llama(tied=tied)
    plugin = TensorParallel(llama_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], plugins=[plugin])
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    return rank // 2, train(model, [rank // 2], steps, lr=3e-3, loss=loss_of)


@pytest.mark.parametrize(
    ("steps", "tied"), [(3, True), pytest.param(50, False, marks=pytest.mark.thorough)]
)
def test_llama_trains_like_one_process(world4: World, steps: int, tied: bool) -> None:
    found = world4.run(trained, steps, tied, timeout=200)
    expected = train(llama(tied=tied), range(2), steps, lr=3e-3, loss=loss_of)
    losses = mean_over({part: curve.losses for part, curve in found}.values())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(losses[:3], expected.losses[:3], rtol=1e-4, atol=1e-4)


def test_grouped_keys_must_divide() -> None:
    with pytest.raises(SettingError, match=r"self_attn.k_proj' makes 2 heads of 8.* over 4 ranks"):
        check(llama_plan(), llama(), 4)
