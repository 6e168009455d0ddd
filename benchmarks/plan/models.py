"""The models of the step rows, as ``polyshard plan`` imports them: without arguments."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Shard

from benchmarks.step.case import Case
from benchmarks.step.engines import build_model
from benchmarks.step.rows import NARROW, WIDE
from polyshard_demo.model import LanguageModel

LONGEST = 512
"""Tokens of the longest row; those that are not used cost nothing."""


def wide() -> LanguageModel:
    return _model(WIDE)


def narrow() -> LanguageModel:
    return _model(NARROW)


def columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices are sharded on dim 1."""
    return Shard(1) if parameter.ndim == 2 else None


def tiny() -> LanguageModel:
    """To see that a benchmark runs."""
    return _model(Case(width=128, layers=2))


def _model(case: Case) -> LanguageModel:
    return build_model(Case(width=case.width, layers=case.layers, tokens=LONGEST))
