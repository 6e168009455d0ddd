"""Digests that do not know how a tensor is divided.

[Note: weighted words]
An element's bits are one word, or two of 32 bits. Each is multiplied by an odd number that its
index in the *whole* tensor gives, one factor a dim, and all are added modulo 2^64. So ranks'
partial digests add up to the same number however rows are divided, and along whichever dim. One
element that changes, in however many bits, changes a word by less than 2^32, which times an odd
number is not a multiple of 2^64: it is never lost. Changes of several cancel by chance alone. The
likeliest are those of all signs of a matrix at once, the top bits of its words: what is left of the
weights' two sums has to end in 33 zero bits, which is one case in tens of millions.

Sums of a rank's memory, as guards take, go faster and see every burst of bits, but begin anew where
shards do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyshard_reproducible.parts import Part, few_rows
from polyshard_reproducible.randomness import seed_of

MASK = (1 << 64) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_GOLDEN = 0x1E3779B97F4A7C15
_MIXING = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # the finalizer of SplitMix64


@torch.no_grad()
def digest(part: Part) -> Tensor:
    """What ``part`` adds to the digest of the whole (0-dim int64, on its device; nothing waits)."""
    words = _words(part.local)
    starts = [0] * words.ndim
    if part.cut is not None:
        starts[part.cut.dim] = part.cut.start
    factor = seed_of(str(part.local.dtype), *part.shape) | 1
    for dim in reversed(range(words.ndim)):  # the last dim, then those before it
        words = _weighted(words, _weights(dim, starts[dim], words))
    return words.long() * factor


def _words(local: Tensor) -> Tensor:
    """The bits as integers; 64-bit elements in a further dim."""
    local = local.detach().resolve_conj().resolve_neg()
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.ndim:
        local = local.view(1)
    if local.itemsize == 8:
        local = local.contiguous().unsqueeze(-1)
    return local.view(_WORDS[local.itemsize])


def _weighted(words: Tensor, weights: Tensor) -> Tensor:
    """``(words * weights).sum(-1)``, a few rows at a time."""
    length = words.shape[-1]
    shape = words.shape[:-1]
    rows = words.reshape(math.prod(shape), length)
    sums = [(some * weights).sum(-1) for some in few_rows(rows)]
    return (torch.cat(sums) if len(sums) > 1 else sums[0]).view(shape)


def _weights(dim: int, start: int, words: Tensor) -> Tensor:
    """Odd numbers, of the indices from ``start`` on."""
    stop = start + words.shape[dim]
    mixed = torch.arange(start, stop, device=words.device) * _GOLDEN + seed_of("dim", dim)
    for shift, factor in _MIXING:
        mixed = (mixed ^ (mixed >> shift & (MASK >> shift))) * factor
    return (mixed ^ (mixed >> 31 & (MASK >> 31))) | 1
