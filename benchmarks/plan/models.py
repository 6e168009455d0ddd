"""The models of the step rows, as ``polyshard plan`` imports them: without arguments."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.tensor import Shard

from benchmarks.step.case import Case
from benchmarks.step.engines import build_model

LONGEST = 512
"""Tokens of the longest row; those that are not used cost nothing."""


def columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices are sharded on dim 1."""
    return Shard(1) if parameter.ndim == 2 else None


width_1024 = partial(build_model, Case(width=1024, tokens=LONGEST))
width_512 = partial(build_model, Case(width=512, tokens=LONGEST))
width_128 = partial(build_model, Case(width=128, layers=2, tokens=LONGEST))


def name_of(case: Case) -> str:
    """What ``polyshard plan`` imports the model of a case by."""
    return f"{__name__}:width_{case.width}"
