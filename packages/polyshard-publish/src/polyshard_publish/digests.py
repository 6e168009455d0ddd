"""Digests of tensors that do not depend on which rank holds which part.

[Note: sums over words]
The rows of a tensor (its last dim) are read as signed words of four bytes, filled up with zeros.
The digest is ``sum(word[i] * key(i)) mod 2^64``, where ``key(i)`` is the product of one odd
pseudo-random number for each dim's index. So

- each rank may add the parts that it holds, in any order: ranks sum theirs, and a receiver that
  holds the tensor whole, or cut in another way, finds the same number. A word that is cut is the
  sum of its parts, each with zeros for the rest;
- one changed word always changes the digest, as an odd factor loses no bit;
- several changed, exchanged, zeroed or stale words leave it as it was with a probability of at
  most 2^-31, as differences are smaller than 2^33 and keys are 64 bits wide. This is multilinear
  hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014), with integers that
  every device can add.

It finds faults, not forgers: the keys are public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 1 << 18
"""Words that are widened to 64 bits at one time: what a core's cache holds."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def bits(values: Tensor) -> Tensor:
    """The elements as integers of their size, in the same memory."""
    return values.view(_INTEGERS[values.element_size()])


def digest(part: Tensor, offsets: Sequence[int]) -> int:
    """What ``part``, which begins at ``offsets`` of its tensor, adds to that tensor's digest.

    A signed 64-bit integer; sums of it wrap around. See [Note: sums over words].
    """
    if not part.numel():
        return 0
    if not part.ndim:
        part, offsets = part.view(1), (0,)
    begin = offsets[-1] * part.element_size() // 4
    words = _words(part, offsets[-1])
    rows = torch.ones(1, dtype=torch.int64, device=part.device)
    for dim, start in enumerate(offsets[:-1]):
        rows = (rows[:, None] * _keys(start, part.shape[dim], dim, part.device)).flatten()
    keys = _keys(begin, words.shape[1], part.ndim - 1, part.device)
    return int((_row_sums(words, keys) * rows).sum())


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
    found = [torch.zeros(0, dtype=torch.int64, device=flat.device)]
    for rows in (flat[:whole].view(-1, block), flat[whole:].view(1, -1)):
        if rows.numel():
            words = _words(rows, 0)
            found.append(_row_sums(words, _keys(0, words.shape[1], 0, flat.device)))
    return torch.cat(found)


def wrapped(total: int) -> int:
    """An integer modulo 2^64, as a signed one."""
    return (total + 2**63) % 2**64 - 2**63


def _words(part: Tensor, start: int) -> Tensor:
    """The words (``[rows, words]``) of rows that begin at element ``start`` of theirs."""
    count = max(1, 4 // part.element_size())
    lead, rest = start % count, -(start + part.shape[-1]) % count
    # Dims of one index keep what stride they have when a tensor is contiguous; these do not.
    part = bits(part.contiguous().view(-1).view(part.shape))
    if lead or rest:
        part = F.pad(part, (lead, rest))
    elif part.storage_offset() % count:
        part = part.clone()
    words = part.view(torch.int32)
    return words.view(-1, words.shape[-1])


def _row_sums(words: Tensor, keys: Tensor) -> Tensor:
    """Each row's sum of words times keys (``[rows]`` int64)."""
    few = max(1, AT_ONCE // len(keys))
    columns = zip(words.split(AT_ONCE, 1), keys.split(AT_ONCE), strict=True)
    sums = [torch.cat([(rows * key).sum(1) for rows in one.split(few)]) for one, key in columns]
    return torch.stack(sums).sum(0)


def _keys(start: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Odd numbers with bits all over, one for each index of a dim."""
    number = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    number = (number + (dim << 40)) * _ODD[0]
    number = (number ^ (number >> 31)) * _ODD[1]
    number = (number ^ (number >> 29)) * _ODD[2]
    return (number ^ (number >> 32)) | 1
