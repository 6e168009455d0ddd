"""Digests of memory: integer sums that no change of neighbouring bits leaves as they were.

[Note: sums of words]
Memory is read as 64-bit words, and words are added modulo 2^64, a sum for every 64 KiB. A flipped
bit changes its word by a power of two, and so the sum. Bits that flip within 64 neighbouring ones
touch two words at most: the change of the first is a multiple of 2^k, that of the second less than
2^k and not zero, so they cannot cancel. Changes further apart cancel only within the same 64 KiB,
and only where they happen to be opposite. A sum of integers does not depend on the order, so
accelerators may add in any; nothing is allocated but the sums, and nothing is waited for.

On the CPU a CRC-32 takes four times as long as these sums, which go at the pace of memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor

CHUNK_WORDS = 8192
WORD_BYTES = 8
_SPREAD = 0x1E3779B97F4A7C15  # odd, with bits all over


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Sums over the memory of this rank's part of ``tensor`` (``[sums]`` int64, on its device).

    How many there are follows from how many bytes it has.
    """
    sums = [one for part in parts(tensor) for one in _sums(_bytes(part))]
    if not sums:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return sums[0] if len(sums) == 1 else torch.cat([one.to(sums[0].device) for one in sums])


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors with memory that make up this rank's part of ``tensor``."""
    if isinstance(tensor, DTensor):
        yield from parts(local_tensor(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):  # a subclass around other tensors
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor.detach()


def summary(sums: Tensor) -> Tensor:
    """One number for a digest (0-dim int64), in which no single change is lost."""
    places = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    return (sums * (places * _SPREAD | 1)).sum()


def place_of(first: Tensor, second: Tensor, nbytes: int) -> tuple[int, int]:
    """From which byte to which two digests of ``nbytes`` bytes in one piece differ first."""
    chunk = CHUNK_WORDS * WORD_BYTES
    index = min(int((first != second).nonzero()[0]), (nbytes - 1) // chunk)
    return index * chunk, min((index + 1) * chunk, nbytes)


def _bytes(part: Tensor) -> Tensor:
    """The memory as bytes; a copy only of what does not lie there end to end."""
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    if not part.is_contiguous() or part.storage_offset() * part.itemsize % WORD_BYTES:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(-1).view(torch.uint8)


def _sums(memory: Tensor) -> Iterator[Tensor]:
    whole = memory.numel() // WORD_BYTES
    words = memory[: whole * WORD_BYTES].view(torch.int64)
    rows = whole // CHUNK_WORDS
    if rows:
        yield words[: rows * CHUNK_WORDS].view(rows, CHUNK_WORDS).sum(1)
    if whole > rows * CHUNK_WORDS:
        yield words[rows * CHUNK_WORDS :].sum().view(1)
    if memory.numel() > whole * WORD_BYTES:  # bytes that fill no word, in one of their own
        rest = memory.new_zeros(WORD_BYTES)
        rest[: memory.numel() - whole * WORD_BYTES] = memory[whole * WORD_BYTES :]
        yield rest.view(torch.int64)
