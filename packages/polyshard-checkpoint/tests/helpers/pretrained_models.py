"""Architectures of transformers at tiny sizes, with batches that each of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import polyshard

VOCABULARY = 67
"""No number of ranks divides it."""
ROWS, LENGTH = 12, 8
"""Of a batch; two, three and four ranks divide the rows."""
PIXELS = 16


@dataclass(frozen=True)
class Architecture:
    """A model by its config class.

    Attributes:
        name: of the family.
        model: its class.
        config: its config's class.
        settings: of the config.
        takes: ``tokens`` (and predicts the next one), ``pairs`` of texts, ``speech`` or ``images``.
        special: what makes it another case than the others.
    """

    name: str
    model: str
    config: str
    settings: Mapping[str, Any]
    takes: str = "tokens"
    special: str = ""

    def build(self, *, tied: bool | None = None) -> Any:
        """A model, with random weights of one seed."""
        settings = dict(self.settings) | ({} if tied is None else {"tie_word_embeddings": tied})
        torch.manual_seed(3)
        config = getattr(transformers, self.config)(**settings)
        return getattr(transformers, self.model)(config)

    def on_meta(self, folder: Any) -> Any:
        """A model without memory, by the config in a folder."""
        config = getattr(transformers, self.config).from_pretrained(folder)
        with torch.device("meta"):
            return getattr(transformers, self.model)(config)

    def batch(self, seed: int) -> dict[str, Tensor]:
        """Inputs and labels of ``ROWS`` rows."""
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
        if self.takes == "images":
            pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=random)
            return {"pixel_values": pixels, "labels": tokens[:, 0] % 3}
        if self.takes == "speech":
            sound = torch.randn(ROWS, 8, 2 * LENGTH, generator=random)
            return {"input_features": sound, "labels": tokens}
        labels = tokens.flip(1) if self.takes == "pairs" else tokens
        return {"input_ids": tokens, "labels": labels}

    @torch.no_grad()
    def answer(self, model: Any) -> Tensor:
        """What a model makes of a batch: tokens that it generates, or classes' scores."""
        given = self.batch(99)
        del given["labels"]
        model.eval()
        if self.takes == "images":
            scores: Tensor = model(**given).logits
            return scores
        found: Tensor = model.generate(
            **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
        )
        return found


def _decoder(**others: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 36,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 6, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
        "max_position_embeddings": 32, **others,
    }  # fmt: skip


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("Llama", "LlamaForCausalLM", "LlamaConfig", _decoder()),
        Architecture(
            "Qwen3", "Qwen3ForCausalLM", "Qwen3Config", _decoder(tie_word_embeddings=True),
            special="tied head, norms of queries and keys",
        ),
        Architecture(
            "Gemma", "GemmaForCausalLM", "GemmaConfig", _decoder(),
            special="tied head, scaled embedding",
        ),
        Architecture(
            "Mistral", "MistralForCausalLM", "MistralConfig", _decoder(sliding_window=4),
            special="sliding window",
        ),
        Architecture(
            "Mixtral", "MixtralForCausalLM", "MixtralConfig",
            _decoder(num_local_experts=5, num_experts_per_tok=2),
            special="experts: stacked in the model, apart in files",
        ),
        Architecture(
            "GPT-2", "GPT2LMHeadModel", "GPT2Config",
            {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
             "eos_token_id": 2, "attn_implementation": "eager"},
            special="tied head, weights that are transposed",
        ),
        Architecture(
            "OPT", "OPTForCausalLM", "OPTConfig",
            {"vocab_size": VOCABULARY, "hidden_size": 24, "ffn_dim": 38, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 24,
             "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "attn_implementation": "eager"},
            special="tied head, learned positions",
        ),
        Architecture(
            "T5", "T5ForConditionalGeneration", "T5Config",
            {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 38, "num_layers": 2,
             "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
             "eos_token_id": 1},
            takes="pairs", special="encoder and decoder, one embedding for both and the head",
        ),
        Architecture(
            "ViT", "ViTForImageClassification", "ViTConfig",
            {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 38, "image_size": PIXELS, "patch_size": 8, "num_labels": 3,
             "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
             "attn_implementation": "eager"},
            takes="images", special="convolution, other names in files",
        ),
        Architecture(
            "Whisper", "WhisperForConditionalGeneration", "WhisperConfig",
            {"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 38,
             "decoder_ffn_dim": 38, "num_mel_bins": 8, "max_source_positions": LENGTH,
             "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
             "suppress_tokens": None, "attn_implementation": "eager"},
            takes="speech", special="speech, convolutions, frozen positions, tied head",
        ),
    )
}  # fmt: skip


QWEN3_MOE = Architecture(
    "Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
    _decoder(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20),
)  # fmt: skip
"""Experts apart in files under other names than Mixtral's."""


def shard(model: Any, **keywords: Any) -> Any:
    """Members of outermost module lists are units, the rest is one; ``generate`` gathers that."""
    lists: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not is_inside:
            lists.append(name)
            for member in module:
                polyshard.fully_shard(member, **keywords)
    polyshard.fully_shard(model, **keywords)
    if hasattr(model, "generate"):
        polyshard.register_fsdp_forward_method(model, "generate")
    return model


def train(
    model: Any, architecture: Architecture, rank: int = 0, size: int = 1, wrap: Any = None
) -> list[float]:
    """Losses of five steps, of this rank's rows; ``wrap`` makes an optimizer of the optimizer.

    By SGD: Adam's first steps are signs of gradients, also of those that are rounding.
    """
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    optimizer = optimizer if wrap is None else wrap(optimizer)
    return train_steps(model, optimizer, architecture, range(5), rank, size)


def train_steps(
    model: Any,
    optimizer: Any,
    architecture: Architecture,
    which: range,
    rank: int = 0,
    size: int = 1,
) -> list[float]:
    """Losses of these steps, of this rank's rows."""
    losses = []
    for step in which:
        given = {name: rows.chunk(size)[rank] for name, rows in architecture.batch(step).items()}
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def read_bytes() -> int:
    """What this process has read from files, by any call."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def resident(field: str) -> int:
    """Bytes of ``VmRSS:`` or ``VmHWM:``."""
    return 1024 * int(Path("/proc/self/status").read_text().split(field)[1].split()[0])


def values(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, gathered."""
    named: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in named.items()
    }
