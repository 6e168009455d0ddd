"""A Llama-3 decoder of any size: RMSNorm, rotary positions, grouped keys, SwiGLU.

Sizes of Llama-3-8B are those of the model's published ``config.json``
(https://huggingface.co/meta-llama/Meta-Llama-3-8B). Values do not matter here, so there are none:
build it on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaSettings:
    """Sizes in elements; ``heads`` share ``kv_heads`` keys and values."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    layers: int = 32
    rope_base: float = 500000.0

    def __post_init__(self) -> None:
        """Heads divide the width, and kv heads the heads.

        Raises:
            ValueError: if they do not.
        """
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} must divide {self.heads}, and that {self.width}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal, with rotary positions; ``[B, T, D]`` to ``[B, T, D]``."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.settings = settings
        keys = settings.kv_heads * settings.head_width
        self.query = _linear(settings.width, settings.width)
        self.key = _linear(settings.width, keys)
        self.value = _linear(settings.width, keys)
        self.output = _linear(settings.width, settings.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """``angles`` are ``[T, K / 2]``."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.settings.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, angles), _rotate(key, angles)
        repeats = self.settings.heads // self.settings.kv_heads
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each added to its normalised input."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.gate = _linear(settings.width, settings.hidden)
        self.up = _linear(settings.width, settings.hidden)
        self.down = _linear(settings.hidden, settings.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.feed_forward_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """A Llama-style decoder, from tokens to logits."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.head = _linear(settings.width, settings.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``."""
        x = self.embedding(tokens)
        half = torch.arange(0, self.settings.head_width, 2, device=tokens.device)
        rates = self.settings.rope_base ** (-half / self.settings.head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of elements of ``[B, H, T, K]`` by ``angles``."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)
