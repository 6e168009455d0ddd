"""Digests of tensors that do not depend on which rank holds which part.

[Note: sums over elements]
The digest of a tensor is ``sum(bits(x[i]) * key(i)) mod 2^64`` over its elements. ``bits`` reads an
element as a signed integer of its size (elements above four bytes are several of four), and
``key(i)`` is the product of one odd pseudo-random number for each dim's index. So

- parts may be added by whoever holds them, in any order: ranks sum theirs, and a receiver that
  holds the tensor whole, or cut in another way, finds the same number;
- one changed element always changes the digest, as an odd factor loses no bit;
- several changed, exchanged, zeroed or stale elements leave it as it was with a probability of at
  most 2^-31, as differences are smaller than 2^33 and keys are 64 bits wide. This is multilinear
  hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014), with integers that
  every device can add.

It finds faults, not forgers: the keys are public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyshard_publish.blocks import Block, split

AT_ONCE = 1 << 20
"""Elements that are widened to 64 bits at one time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def bits(values: Tensor) -> Tensor:
    """The elements as integers; one more dim where they have more than four bytes."""
    size = values.element_size()
    if size <= 4:
        return values.view(_INTEGERS[size])
    return values.contiguous().unsqueeze(-1).view(torch.int32)


def digest(part: Tensor, offsets: Sequence[int]) -> int:
    """What ``part``, which begins at ``offsets`` of its tensor, adds to that tensor's digest.

    A signed 64-bit integer; sums of it wrap around. See [Note: sums over elements].
    """
    total = 0
    for block in split(Block((0,) * part.ndim, tuple(part.shape)), AT_ONCE):
        piece = part[block.slices()]
        starts = [o + b for o, b in zip(offsets, block.offsets, strict=True)]
        total += int(_summed(bits(piece), starts))
    return wrapped(total)


def digest_of(tensor: Tensor) -> int:
    """The digest of a tensor that is whole."""
    return digest(tensor, (0,) * tensor.ndim)


def summary(digests: Mapping[str, int]) -> int:
    """One number for the digests of all tensors, by name."""
    ordered = [digests[name] for name in sorted(digests)]
    return digest_of(torch.tensor(ordered, dtype=torch.int64, device="cpu"))


def block_digests(flat: Tensor, block: int) -> Tensor:
    """A digest of every ``block`` elements of a flat tensor (``[blocks]`` int64)."""
    whole = flat.numel() // block * block
    found = [_summed_rows(bits(flat[:whole].view(-1, block)), block)] if whole else []
    if whole < flat.numel():
        found.append(_summed_rows(bits(flat[whole:].view(1, -1)), flat.numel() - whole))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=flat.device)


def wrapped(total: int) -> int:
    """An integer modulo 2^64, as a signed one."""
    return (total + 2**63) % 2**64 - 2**63


def _summed(numbers: Tensor, starts: Sequence[int]) -> Tensor:
    """Over all dims, the last one first; a dim that ``bits`` added begins at 0."""
    starts = [*starts, *[0] * (numbers.ndim - len(starts))]
    for dim in reversed(range(numbers.ndim)):
        keys = _keys(starts[dim], numbers.shape[dim], dim, numbers.device)
        numbers = (numbers * keys).sum(-1)
    return numbers.to(torch.int64)


def _summed_rows(numbers: Tensor, block: int) -> Tensor:
    rows = max(1, AT_ONCE // block)
    sums = []
    for few in numbers.split(rows):
        within = few.flatten(1)
        sums.append((within * _keys(0, within.shape[1], 0, few.device)).sum(1))
    return torch.cat(sums)


def _keys(start: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Odd numbers with bits all over, one for each index of a dim."""
    number = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    number = (number + (dim << 40)) * _ODD[0]
    number = (number ^ (number >> 31)) * _ODD[1]
    number = (number ^ (number >> 29)) * _ODD[2]
    return (number ^ (number >> 32)) | 1
