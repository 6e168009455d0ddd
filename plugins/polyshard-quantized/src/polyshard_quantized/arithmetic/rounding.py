"""Stochastic rounding: right on average, and the same for the same seed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from polyshard_quantized.workspace import Workspace


class Stochastic:
    """Rounds up with the probability of the fraction. For gradients only: noise in weights harms.

    The noise is that of a generator of its own, seeded before every reduction from what it is
    drawn for, so it does not depend on anything else a program draws.
    """

    def __init__(self, workspace: Workspace, device: torch.device) -> None:
        """Noise is drawn on ``device``."""
        self._workspace = workspace
        self._generator = torch.Generator(device=device)

    def seed(self, *purpose: object) -> None:
        """Start the noise of one reduction; equal purposes get equal noise."""
        text = " ".join(map(str, purpose)).encode()
        digest = hashlib.blake2b(text, digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "big"))

    def round_(self, values: Tensor, largest: float) -> None:
        """Add noise from [0, 1) and round down; the clamp catches sums that rounded up to 1."""
        noise = self._workspace.take("noise", values.shape, values.dtype, values.device)
        noise.uniform_(generator=self._generator)
        values.add_(noise).floor_().clamp_(-largest, largest)
