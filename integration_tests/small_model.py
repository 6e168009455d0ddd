"""The model of all cells, its batches and its optimizer; nothing here knows of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composition_table import Cell
from polyshard_demo.model import LanguageModel, ModelSettings

SEQUENCE = 8
BACKEND = "aot_eager"


def build(cell: Cell, seed: int = 0) -> LanguageModel:
    """A transformer; its feed-forward rows leave a remainder over the ranks that share them.

    With replicas the head is tied to the embedding.
    """
    torch.manual_seed(seed)
    hidden = 54 if cell.layout.tensor > 1 else 51  # 27 rows a tensor-parallel rank, or 51, over 2
    tied = cell.layout.replicas > 1
    settings = ModelSettings(
        width=32, layers=2, heads=4, hidden=hidden, sequence=SEQUENCE, tied=tied
    )
    return LanguageModel(settings)


def prepare(model: LanguageModel, cell: Cell) -> None:
    """What a feature does to the blocks."""
    blocks: list[Any] = list(model.blocks)
    if cell.feature == "checkpointing":
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    elif cell.feature == "compiled":
        for block in blocks[:1] if cell.layout.ranks > 2 else blocks:
            block.compile(backend=BACKEND)


def loss_of(model: nn.Module, index: int, part: int) -> Tensor:
    """Of batch ``index`` of data-parallel rank ``part``."""
    generator = torch.Generator().manual_seed(1000 * index + part)
    tokens = torch.randint(0, 256, (2, SEQUENCE + 1), generator=generator)
    device = torch.get_default_device()  # of ranks on one, where parameters may rest elsewhere
    tokens = tokens.to(next(model.parameters()).device if device.type == "cpu" else device)
    logits: Tensor = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """AdamW whose updates grow with the gradients: ``eps`` is several times as large as they are.

    With the usual ``eps`` a gradient twice as large as it should be changes nothing, and one in
    the last bit near zero changes everything.
    """
    return torch.optim.AdamW(model.parameters(), lr=0.5, eps=0.5)
