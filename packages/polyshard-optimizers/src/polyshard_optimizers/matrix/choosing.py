"""Which parameters are matrices, how they are cut into independent ones, and who owns which."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polyshard.plugins.seams import GroupInfo, ParamInfo
from polyshard_optimizers.matrix.errors import MatrixError

Chooses = Callable[[str, tuple[int, ...]], bool]
Counts = Callable[[str, tuple[int, ...]], int]
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|tok_\w+)([._]|$)")
_OUTPUT = re.compile(r"(^|[._])((lm_head|classifier)([._]|$)|(head|output)([._][^.]+)?$)")
_INNER = re.compile(r"(^|[._])(attn|attention|mlp|ffn|feed_forward|experts?)([._]|$)")


def hidden_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Two-dim parameters but those that are called as embeddings and output layers are.

    ``name`` is that within the unit which is sharded. Stacked experts (3-D) are matrices too. What
    attention and feed-forward layers call their output is one of their matrices.
    """
    ends = _EMBEDDING.search(name) or (_OUTPUT.search(name) and not _INNER.search(name))
    return len(shape) in (2, 3) and not ends


def one_block(name: str, shape: tuple[int, ...]) -> int:
    """Every matrix is one."""
    del name, shape
    return 1


@dataclass(frozen=True)
class Cut:
    """How a parameter holds independent matrices: stacked (3-D), or as blocks of its rows."""

    count: int
    shape: tuple[int, int]
    """Of each."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], blocks: int) -> Cut:
        """Of a parameter of ``shape`` in so many ``blocks`` of rows.

        Raises:
            MatrixError: when it cannot be cut so.
        """
        if len(shape) == 3 and blocks == 1:
            return cls(shape[0], (shape[1], shape[2]))
        if len(shape) != 2 or blocks < 1 or shape[0] % blocks:
            raise MatrixError(
                f"'{name}' {shape} is to be {blocks} matrices: a matrix has 2 dims, stacked ones "
                "have 3, and blocks of rows are equal. Choose others with matrices= or blocks=."
            )
        return cls(blocks, (shape[0] // blocks, shape[1]))

    def views(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The matrices in ``whole``."""
        return whole.reshape(self.count, *self.shape).unbind()

    def rows(self, extent: int) -> int:
        """Rows of each, where all of them are so many."""
        return extent // self.count if self.count and extent else 1

    def within(self, extent: int, start: int, stop: int) -> tuple[int, int]:
        """The first of those that are these rows of ``extent``, and how many are."""
        rows = self.rows(extent)
        return start // rows, (stop - start) // rows

    @property
    def cost(self) -> int:
        """Multiplications of one product, for each matrix."""
        short, long = sorted(self.shape)
        return self.count * short * short * long

    @property
    def numel(self) -> int:
        """Elements, which optimizer state has a multiple of."""
        return self.count * math.prod(self.shape)


def stays_in_rows(parameter: ParamInfo, cut: Cut, group: GroupInfo) -> bool:
    """Whether every rank's shard holds as many whole matrices: then nothing has to move.

    Not where there are replicas, of which all would do the same, nor where parts are divided.
    """
    world, extent = group.world_size, parameter.shape[0]
    alone = world > 1 and group.mesh.size() == world
    in_rows = parameter.shard_dim == 0 and parameter.part_shape == parameter.shape
    return alone and in_rows and cut.count > 0 and cut.count % world == 0 and extent > 0


@dataclass
class Balance:
    """What each rank of each mesh has been given so far; the same on all ranks."""

    _loads: dict[object, list[tuple[int, int]]] = field(default_factory=dict)

    def owners(self, group: GroupInfo, cuts: Sequence[Cut | None]) -> list[int | None]:
        """The rank with the least work gets the next costly matrix, of those the emptiest."""
        mesh = group.mesh
        key = (mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape))
        loads = self._loads.setdefault(key, [(0, 0)] * mesh.size())
        owners: list[int | None] = [None] * len(cuts)
        chosen = [(i, cut) for i, cut in enumerate(cuts) if cut is not None]
        for index, cut in sorted(chosen, key=lambda found: (-found[1].cost, found[0])):
            rank = min(range(len(loads)), key=lambda r: (*loads[r], r))
            work, elements = loads[rank]
            loads[rank] = (work + cut.cost, elements + cut.numel)
            owners[index] = rank
        return owners


@dataclass
class Leads:
    """Which place beside each owner puts parts together (see [Note: leads] of ``parts.py``)."""

    _loads: dict[object, list[int]] = field(default_factory=dict)
    _given: dict[int, int] = field(default_factory=dict)

    def of(self, parameter: Tensor, owner: int, sizes: tuple[int, ...], cut: Cut) -> int:
        """The place with the least work when first asked, among so many on each axis."""
        key = id(parameter)
        if key not in self._given:
            loads = self._loads.setdefault((owner, sizes), [0] * math.prod(sizes))
            self._given[key] = place = loads.index(min(loads))
            loads[place] += cut.cost
        return self._given[key]
