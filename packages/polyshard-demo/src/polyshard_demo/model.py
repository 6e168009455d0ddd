"""A Llama-style language model over bytes: RMSNorm, rotary positions, SwiGLU, causal attention.

Shapes in this file: B sequences, T bytes per sequence, D width, H heads, K = D / H.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from polyshard_demo.settings import PresetName, Settings

__all__ = ["PRESETS", "Block", "LanguageModel", "ModelSettings", "Rotary", "shape_of"]

INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape of the model."""

    width: int  # D, elements per position
    layers: int  # blocks
    heads: int  # H; divides the width into an even K
    hidden: int  # elements inside the feed-forward part
    sequence: int = 128  # longest T that the rotary tables cover, in bytes
    tied: bool = False  # whether the head uses the embedding's weight
    dropout: float = 0.0  # share of what each half of a block adds that is left out in training
    vocabulary: int = 256  # values of a token; those of a byte
    key_heads: int = 0  # of keys and values, which queries share in groups; 0: as many as heads

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be heads {self.heads} x an even number")


PRESETS: Final[Mapping[PresetName, ModelSettings]] = MappingProxyType(
    {
        "tiny": ModelSettings(width=32, layers=2, heads=2, hidden=96),
        "small": ModelSettings(width=256, layers=4, heads=4, hidden=704),
        "medium": ModelSettings(width=768, layers=12, heads=12, hidden=2048),
    }
)


def shape_of(settings: Settings) -> ModelSettings:
    """The shape that the options of a run ask for."""
    return replace(
        PRESETS[settings.preset],
        sequence=settings.sequence,
        tied=settings.tied,
        dropout=settings.dropout,
    )


class LanguageModel(nn.Module):
    """Predicts the next byte. Each module resets its own parameters, so meta init works."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.head = Projection(settings.width, settings.vocabulary, INITIAL_STD)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head, also again: `to_empty` gives every use of a weight its own memory."""
        if self.settings.tied:
            self.head.weight = self.embedding.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocabulary) of the token that follows each of the tokens (B, T), int64."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """(B, T, D) to the same: attention and feed-forward, each added to its normalised input."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.feed_forward = FeedForward(settings)
        self.dropout = nn.Dropout(settings.dropout)  # draws nothing where it is 0

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        output: Tensor = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return output


class Attention(nn.Module):
    """(B, T, D) to the same: causal self-attention with rotary positions.

    The number of heads follows from the projections' outputs, so that a tensor-parallel plan that
    leaves each rank some of the heads needs no change here.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.head_width = width // settings.heads
        self.query = Projection(width, width, INITIAL_STD)
        keys = (settings.key_heads or settings.heads) * self.head_width
        self.key = Projection(width, keys, INITIAL_STD)
        self.value = Projection(width, keys, INITIAL_STD)
        self.output = Projection(width, width, _residual_std(settings))
        self.rotary = Rotary(self.head_width, settings.sequence)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        query = self.rotary(self._heads(self.query(hidden)))
        key = self.rotary(self._heads(self.key(hidden)))
        value = self._heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] < query.shape[1]
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        """(B, T, H * K) to (B, H, T, K)."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_width))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """(B, T, D) to the same by SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = Projection(settings.width, settings.hidden, INITIAL_STD)
        self.up = Projection(settings.width, settings.hidden, INITIAL_STD)
        self.down = Projection(settings.hidden, settings.width, _residual_std(settings))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class Rotary(nn.Module):
    """Turns element pairs (i, i + K/2) of position t by the angle ``t * 10000 ** (-2i / K)``."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_width: int, sequence: int) -> None:
        super().__init__()
        table = torch.empty(sequence, head_width // 2, device=torch.get_default_device())
        self.register_buffer("cosine", table, persistent=False)
        self.register_buffer("sine", table.clone(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, float32, shape (sequence, K / 2)."""
        sequence, half = self.cosine.shape
        device = self.cosine.device
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
        angle = torch.arange(sequence, dtype=torch.float64, device=device).outer(frequency)
        self.cosine.copy_(angle.cos())
        self.sine.copy_(angle.sin())

    @override
    def forward(self, heads: Tensor) -> Tensor:
        """(B, H, T, K) to the same shape and dtype; the turn itself is done in float32."""
        length = heads.shape[-2]
        cosine, sine = self.cosine[:length], self.sine[:length]
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class Projection(nn.Linear):
    """A linear map without bias, drawn from a normal distribution of standard deviation `std`."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A vector per byte value, drawn like the projections."""

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


def _residual_std(settings: ModelSettings) -> float:
    """Standard deviation that keeps the sum of all blocks' outputs at its initial scale."""
    return float(INITIAL_STD / (2 * settings.layers) ** 0.5)
