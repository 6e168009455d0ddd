"""Groups for tests of codecs, without any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyshard.plugins.seams import GroupIdentity, GroupInfo, ParamInfo
from polyshard.sharding.layout import GroupLayout, ParameterShape, plan_layout
from polyshard_testing.cases import chunk_rows, local_part

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Dtypes:
    """Dtypes at rest, in compute and in reduction."""

    orig: torch.dtype = torch.float32
    param: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


@dataclass(frozen=True)
class Toy:
    """One group on one world size, seen from one rank."""

    info: GroupInfo
    layout: GroupLayout

    def shard(self, values: Sequence[Tensor]) -> Tensor:
        """This rank's shard buffer; NaN where nothing rests, which must not be read."""
        shard = torch.full((self.layout.shard_numel,), torch.nan, dtype=self.info.orig_dtype)
        for value, placed in zip(values, self.layout.parameters, strict=True):
            local = local_part(value, placed, self.info.rank).reshape(-1)
            shard[placed.shard_offset : placed.shard_offset + local.numel()] = local
        return shard

    def chunks(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``[W, chunk_numel]`` of every gradient, in the reduce dtype."""
        pairs = zip(gradients, self.layout.parameters, strict=True)
        return [chunk_rows(g.float(), placed).to(self.info.reduce_dtype) for g, placed in pairs]

    def regions(self) -> list[Tensor]:
        """Strided targets of a decoding, filled with NaN."""
        return [
            torch.full((p.world_size, p.chunk_numel + 5), torch.nan, dtype=self.info.param_dtype)[
                :, : p.chunk_numel
            ]
            for p in self.layout.parameters
        ]

    def outs(self) -> list[Tensor]:
        """Targets of a sum."""
        dtype = self.info.reduce_dtype
        return [
            torch.full((p.chunk_numel,), torch.nan, dtype=dtype) for p in self.layout.parameters
        ]


def toys(
    shapes: Sequence[tuple[int, ...]], world_size: int, dtypes: Dtypes | None = None
) -> list[Toy]:
    """Every rank's view of a group of parameters of these shapes."""
    used = Dtypes() if dtypes is None else dtypes
    mesh = cast("Any", None)
    parameters = tuple(
        ParamInfo(f"p{i}", shape, used.orig, True, mesh, nn.Linear)
        for i, shape in enumerate(shapes)
    )
    wanted = [ParameterShape(p.fqn, p.shape, 0 if p.shape else None) for p in parameters]
    layout = plan_layout(wanted, world_size, used.orig.itemsize, staging_bytes=4096)
    return [
        Toy(
            GroupInfo(
                identity=GroupIdentity("toy", is_named=True),
                parameters=parameters,
                mesh=mesh,
                rank=rank,
                world_size=world_size,
                device=torch.device("cpu"),
                orig_dtype=used.orig,
                param_dtype=used.param,
                reduce_dtype=used.reduce,
            ),
            layout,
        )
        for rank in range(world_size)
    ]


def values_of(
    shapes: Sequence[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The same full values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def whole(region: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The full parameter from its ``[W, chunk_numel]`` region (sharded on dim 0)."""
    numel = torch.Size(shape).numel()
    return region.reshape(-1)[:numel].view(shape)
