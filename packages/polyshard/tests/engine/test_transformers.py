"""Models of ``transformers`` with random weights, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_models import full

from polyshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from polyshard_testing import ranks

transformers: Any = pytest.importorskip("transformers")
STEPS = 3
VOCABULARY = 99


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """Its head shares the embedding's weight."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def mixtral() -> nn.Module:
    """A mixture of experts, of which a batch may leave some without a gradient."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=2,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "vit": vit}
LAYERS = {"LlamaDecoderLayer", "GPT2Block", "MixtralDecoderLayer", "ViTLayer"}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def inputs_for(name: str, step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 5, (2,), generator=generator),
        }
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    layers = [m for m in model.modules() if type(m).__name__ in LAYERS]
    assert layers
    for layer in layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(MODELS))
@ranks(2, timeout=180.0)
def test_models_train_as_in_one_process(rank: int, size: int, name: str) -> None:
    model: Any = shard(build(name))
    model.set_reduce_scatter_unused_params(True)
    reference: Any = build(name)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    for step in range(STEPS):
        model(**inputs_for(name, step, rank)).loss.backward()
        for r in range(size):
            (reference(**inputs_for(name, step, r)).loss / size).backward()
        norms = [clip_grad_norm_(m.parameters(), 1.0) for m in (model, reference)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            full(ours.detach()), theirs.detach(), rtol=1e-3, atol=2e-4, msg=key
        )


@ranks(2, timeout=180.0)
def test_tied_embeddings_stay_tied(rank: int, size: int) -> None:
    model: Any = shard(build("gpt2"))
    model(**inputs_for("gpt2", 0, rank)).loss.backward()
    assert model.lm_head.weight is model.transformer.wte.weight
    saved = model.state_dict()
    other: Any = shard(build("gpt2"))
    other.load_state_dict(saved)
    assert other.lm_head.weight is other.transformer.wte.weight


@ranks(2, timeout=180.0)
def test_generation(rank: int, size: int) -> None:
    """``generate`` calls the sharded ``forward`` many times, without gradients."""
    model: Any = shard(build("llama"))
    reference: Any = build("llama")
    prompt = inputs_for("llama", 0, 0)["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        found = model.generate(prompt, **settings)
        assert torch.equal(found, reference.generate(prompt, **settings))


@ranks(2, timeout=180.0)
def test_a_trainers_loop(rank: int, size: int) -> None:
    """A loop as trainers write it: checkpointing, accumulation, bf16, clipping."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses: list[list[float]] = []
    for checkpointing in (False, True):
        model: Any = build("llama")
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(STEPS):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = model(**inputs_for("llama", micro, rank)).loss / 2
                loss.backward()
                losses[-1].append(loss.item())
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1], "recomputation changed a bit"
    assert losses[0][-1] < losses[0][0]
