"""Groups for tests of plugins: odd shapes on several world sizes, without any process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyshard.group.dtypes import Dtypes
from polyshard.plugins.seams import GroupIdentity, GroupInfo, ParamInfo
from polyshard.sharding.layout import GroupLayout, ParameterLayout, ParameterShape, plan_layout

WORLD_SIZES = (1, 2, 3, 5)
SHAPES: tuple[tuple[int, ...], ...] = ((64, 48), (7, 5), (1, 6), (0, 4), (33,), ())
"""Even, uneven, shorter than the world, zero-size, one-dimensional, zero-dimensional."""


@dataclass(frozen=True)
class Case:
    """One group on one world size, seen from one rank."""

    info: GroupInfo
    layout: GroupLayout

    @property
    def rank(self) -> int:
        """Whose view it is."""
        return self.info.rank

    @property
    def group(self) -> tuple[GroupInfo, GroupLayout]:
        """What a part of a plugin is bound to."""
        return self.info, self.layout

    def values(self, seed: int = 0) -> list[Tensor]:
        """Full values of every parameter, the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        found = [
            torch.randn(p.shape, generator=generator, device="cpu") for p in self.info.parameters
        ]
        return [value.to(self.info.orig_dtype) for value in found]

    def shard(self, values: list[Tensor], padding: float = 0.0) -> Tensor:
        """This rank's shard buffer (``[shard_numel]``) holding ``values``, and ``padding``."""
        shard = torch.full(
            (self.layout.shard_numel,), padding, dtype=self.info.orig_dtype, device="cpu"
        )
        for value, placed in zip(values, self.layout.parameters, strict=True):
            local = local_part(value, placed, self.rank).reshape(-1)
            shard[placed.shard_offset : placed.shard_offset + local.numel()] = local
        return shard


def local_part(value: Tensor, placed: ParameterLayout, rank: int) -> Tensor:
    """What ``rank`` holds of ``value``."""
    if placed.dim is None:
        return value
    start, stop = placed.bounds(rank)
    return value.narrow(placed.dim, start, stop - start)


def chunk_rows(value: Tensor, placed: ParameterLayout) -> Tensor:
    """``[W, chunk_numel]``: every rank's chunk of ``value``, zero where there is padding."""
    rows = torch.zeros(placed.world_size, placed.chunk_numel, dtype=value.dtype, device="cpu")
    for rank in range(placed.world_size):
        local = local_part(value, placed, rank).reshape(-1)
        rows[rank, : local.numel()] = local
    return rows


def real_mask(placed: ParameterLayout) -> Tensor:
    """``[W, chunk_numel]``: which elements of the chunks are not padding."""
    return chunk_rows(torch.ones(placed.shape, device="cpu"), placed).bool()


FULL = Dtypes(torch.float32, torch.float32, torch.float32)
MIXED = (
    Dtypes(torch.float32, torch.bfloat16, torch.float32),
    Dtypes(torch.float32, torch.bfloat16, torch.bfloat16),
    Dtypes(torch.bfloat16, torch.bfloat16, torch.float32),
)
"""What ``MixedPrecisionPolicy`` makes of fp32 and bf16 parameters."""


def case(world_size: int, rank: int, dtypes: Dtypes = FULL) -> Case:
    """The standard group on ``world_size`` ranks."""
    # Plugins may look at the mesh, but nothing here has processes: there is none to show.
    mesh = cast("Any", None)
    parameters = tuple(
        ParamInfo(f"layer.{index}.weight", shape, dtypes.orig, True, mesh, nn.Linear)
        for index, shape in enumerate(SHAPES)
    )
    shapes = [ParameterShape(p.fqn, p.shape, 0 if p.shape else None) for p in parameters]
    layout = plan_layout(shapes, world_size, dtypes.orig.itemsize, staging_bytes=256)
    info = GroupInfo(
        identity=GroupIdentity("layer", is_named=True),
        parameters=parameters,
        mesh=mesh,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        orig_dtype=dtypes.orig,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
    )
    return Case(info, layout)


def cases() -> Iterator[list[Case]]:
    """All ranks' views, one world size after another."""
    for world_size in WORLD_SIZES:
        yield [case(world_size, rank) for rank in range(world_size)]


def strided_rows(world_size: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[world_size, numel]`` whose rows do not follow each other in memory."""
    return torch.full((world_size, numel + 3), math.nan, dtype=dtype, device="cpu")[:, :numel]


class SmallModel(nn.Module):
    """Large, small and uneven parameters; trains in milliseconds."""

    def __init__(self) -> None:
        """Two units' worth of layers."""
        super().__init__()
        self.first = nn.Linear(96, 130)
        self.norm = nn.LayerNorm(130)
        self.second = nn.Linear(130, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of seven classes."""
        out: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return out
