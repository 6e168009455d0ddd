"""The kit every plugin passes, with each format."""

from __future__ import annotations

from functools import partial

import pytest

from polyshard_quantized import (
    ErrorFeedback,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    QuantizedComm,
)
from polyshard_testing import PluginConformance
from polyshard_testing.runs import Factory

EVERYTHING = Exclusions(min_ndim=0, min_numel=0)


class TestInt8(PluginConformance):
    kept_share = 3.5  # the workspace, which all groups share

    tolerance = 0.55 / 127  # half a scale; the kit takes 4 for the largest value of its gradients

    @pytest.fixture
    def factory(self) -> Factory:
        return partial(QuantizedComm, gradients=Int8Block(256), exclude=EVERYTHING)


class TestFloat8(PluginConformance):
    kept_share = 3.5  # the workspace, which all groups share

    tolerance = 1 / 16

    @pytest.fixture
    def factory(self) -> Factory:
        form = Float8Block(256)
        return partial(QuantizedComm, weights=form, gradients=form, exclude=EVERYTHING)


class TestInt4Gradients(PluginConformance):
    kept_share = 3.5  # the workspace, which all groups share

    tolerance = 0.55 / 7

    @pytest.fixture
    def factory(self) -> Factory:
        return partial(
            QuantizedComm,
            weights=None,
            gradients=Int4Block(32),
            error_feedback=ErrorFeedback(),
            exclude=EVERYTHING,
        )
