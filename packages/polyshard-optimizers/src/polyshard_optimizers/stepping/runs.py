"""Which parameters lie end to end: arithmetic on addresses, no tensors.

[Note: runs]
A *run* is a stretch of memory without holes in which parameters follow each other, and their
gradients likewise. Shards of a group rest in one buffer, and so do the gradients that it reduced
together, so a run is mostly a whole group. Padding in between ends it: those elements are of no
parameter, and math on them (0 / 0 with ``eps=0``, say) would put values there that codecs see.

[Note: bits of joined parameters]
On the CPU some kernels compute the end of a tensor, less than two vectors of it, in another way
than the rest, which shows in the last bit: the fused ones, and all of 16-bit dtypes. There a
parameter is joined to the one before only where its first element would begin such a pair of
vectors in the run, so that each element is computed as in the parameter alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VECTORS_BYTES = 128
"""Two vectors of the widest kind (AVX-512)."""


@dataclass(frozen=True)
class Stretch:
    """Where one parameter's elements begin, their gradients begin (addresses), and its bytes."""

    weight: int
    gradient: int
    nbytes: int


def find_runs(stretches: Sequence[Stretch], unit_bytes: int = 1) -> list[list[int]]:
    """Indices of ``stretches`` (none empty) by run, in order of address; see [Note: runs].

    ``unit_bytes``: a stretch that is not a multiple of it is the last of its run.
    """
    runs: list[list[int]] = []
    end: tuple[int, int] | None = None
    for index in sorted(range(len(stretches)), key=lambda i: stretches[i].weight):
        one = stretches[index]
        if end == (one.weight, one.gradient):
            runs[-1].append(index)
        else:
            runs.append([index])
        is_whole = one.nbytes % unit_bytes == 0
        end = (one.weight + one.nbytes, one.gradient + one.nbytes) if is_whole else None
    return runs


def follow_each_other(places: Iterable[tuple[int, int]]) -> bool:
    """Whether stretches, given as address and bytes, lie end to end in this order."""
    end: int | None = None
    for address, nbytes in places:
        if end is not None and address != end:
            return False
        end = address + nbytes
    return True


def cut(numel: int, most: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most ``most`` elements that cover ``numel``: an empty one for 0."""
    return [(i, min(i + most, numel)) for i in range(0, numel, most)] or [(0, 0)]
