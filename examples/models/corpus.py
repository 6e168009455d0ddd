"""Real text as bytes: Python's own documentation, which comes with it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from polyshard_demo.text import load_corpus

ROWS = 8
"""Of a batch, on all ranks together."""
TOKENS = 64
"""In a row. A byte is a token."""


@cache
def _text() -> Tensor:
    return load_corpus(None, TOKENS).train


def batch(step: int, part: int = 0, parts: int = 1) -> Tensor:
    """One of ``parts`` equal parts of a step's batch: tokens, int64, ``[ROWS / parts, TOKENS]``."""
    generator = torch.Generator().manual_seed(step)
    count = (len(_text()) - 1) // TOKENS
    chosen = torch.randint(count, (ROWS,), generator=generator)[part::parts].tolist()
    return torch.stack([_text()[row * TOKENS : (row + 1) * TOKENS] for row in chosen]).long()


def tokens_of(text: str) -> Tensor:
    """One row, int64, ``[1, bytes]``."""
    return torch.tensor([list(text.encode())])


def text_of(tokens: Tensor) -> str:
    """What a row of tokens says; what is no byte is left out."""
    return bytes(t for t in tokens.flatten().tolist() if t < 256).decode(errors="replace")
