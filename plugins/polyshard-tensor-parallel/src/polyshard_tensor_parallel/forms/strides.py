"""One tensor dim cut twice: by tensor parallelism first, then by FSDP. Pure arithmetic.

A dim of ``size`` rows is cut into pieces over the model axes, and every piece into chunks over the
shard axis, both as ``torch.chunk`` cuts. A ``DTensor`` reads its placements from left to right,
data axis first: this rank's rows of all pieces lie together, and the model axis cuts *them*. The
two agree unless pieces differ in size; :func:`is_expressible` says whether they still do.
"""

from __future__ import annotations

from polyshard.sharding.layout import chunk_bounds


def chunk_length(size: int, world_size: int, rank: int) -> int:
    """Rows of ``rank`` when ``size`` rows are cut as ``torch.chunk`` cuts them."""
    start, stop = chunk_bounds(size, world_size, rank)
    return stop - start


def is_expressible(size: int, pieces: int, world_size: int) -> bool:
    """Whether strided placements describe ``size`` rows in ``pieces`` over ``world_size`` ranks."""
    lengths = [chunk_length(size, pieces, piece) for piece in range(pieces)]
    for rank in range(world_size):
        held = [chunk_length(length, world_size, rank) for length in lengths]
        total = sum(held)
        if held != [chunk_length(total, pieces, piece) for piece in range(pieces)]:
            return False
    return True
