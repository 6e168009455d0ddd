"""Sums over one fixed binary tree, whichever ranks hold its leaves.

[Note: the tree]
Leaves are the slots of a step, a power of two of them, in order; node ``i`` of a level is the sum
of nodes ``2 i`` and ``2 i + 1`` below it. An aligned block of ``2 ** k`` leaves is a subtree: a
rank sums one without the others, and ranks that hold blocks continue where those end. Where a value
has nothing to add, the neutral element is ``-0.0``: ``x + -0.0`` is bitwise ``x``, also for
``x = -0.0``, of which ``+0.0`` would make ``+0.0``.
"""

from __future__ import annotations

from torch import Tensor

NEUTRAL = -0.0
"""Adding it changes no bit of any number."""


def is_power_of_two(value: int) -> bool:
    """Whether ``value`` leaves can make a whole tree."""
    return value > 0 and value & (value - 1) == 0


def sum_rows(rows: Tensor) -> Tensor:
    """The sum over the first dim, as a tree, in the memory of ``rows[0]``.

    Args:
        rows: ``[n, ...]``, ``n`` a power of two, one leaf a row; used up.
    """
    count = rows.shape[0]
    assert is_power_of_two(count)
    stride = 1
    while stride < count:
        rows[:: 2 * stride].add_(rows[stride :: 2 * stride])
        stride *= 2
    return rows[0]


def sum_halves(values: Tensor) -> Tensor:
    """The sum over the last dim in an order that its length alone decides; ``values`` is used up.

    A kernel's own ``sum`` takes an order by shape, vector length and threads. These are additions
    element by element, which no kernel can make in another order.
    """
    length = values.shape[-1]
    if length == 0:
        return values.sum(-1)
    while length > 1:
        half = (length + 1) // 2
        values[..., : length - half].add_(values[..., half:length])
        length = half
    return values[..., 0]


class TreeSum:
    """One sum of leaves that come one after another; holds ``log2(leaves)`` of them at most."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Tensor]] = []
        """Subtrees that wait for their right neighbour, largest first, by level."""

    @property
    def held(self) -> int:
        """How many sums wait."""
        return len(self._nodes)

    def clear(self) -> None:
        """Forget all leaves."""
        self._nodes.clear()

    def add(self, leaf: Tensor) -> None:
        """Take the next leaf; it is kept, or added to what is."""
        level = 0
        while self._nodes and self._nodes[-1][0] == level:
            leaf.add_(self._nodes.pop()[1])  # the newest memory is what the engine uses again
            level += 1
        self._nodes.append((level, leaf))

    def take(self) -> Tensor:
        """The sum of a power of two of leaves."""
        assert len(self._nodes) == 1, "the tree is not whole"
        return self._nodes.pop()[1]
