"""Settings, discovery, and what the plugin says when they make no sense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from quantized_groups import toys

from polyshard import Plugin, hookimpl
from polyshard.errors import ConflictError, SettingError
from polyshard.plugins.discovery import load_plugin
from polyshard.plugins.stack import build_stack
from polyshard_quantized import (
    ErrorFeedback,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    QuantizedComm,
)
from polyshard_quantized.transfers.gather import QuantizedGather
from polyshard_quantized.workspace import Workspace


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"weights": None}, "both None"),
        ({"weights": "int8"}, "weights must be a BlockFormat"),
        ({"gradients": 8}, "gradients must be a BlockFormat"),
        ({"rounding": "up"}, "nearest, stochastic"),
        ({"rounding": "stochastic"}, "gradients, which stay native"),
        ({"error_feedback": ErrorFeedback()}, "gradients, which stay native"),
        ({"gradients": Int8Block(), "error_feedback": True}, "ErrorFeedback"),
        ({"gradients": Float8Block(), "rounding": "stochastic"}, "whole numbers"),
        ({"exclude": ("norm",)}, "exclude must be Exclusions"),
    ],
)
def test_settings_that_change_nothing_or_clash_are_refused(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        QuantizedComm(**keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"fqns": "lm_head"}, "several patterns"),
        ({"fqns": ("",)}, "several patterns"),
        ({"min_ndim": -1}, "min_ndim"),
        ({"min_numel": 1.5}, "min_numel"),
        ({"min_numel": True}, "min_numel"),
    ],
)
def test_exclusions_that_select_nothing_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Exclusions(**keywords)


@pytest.mark.parametrize(
    "keywords", [{"decay": 0.0}, {"decay": 1.5}, {"decay": "1"}, {"reset_every": 0}]
)
def test_feedback_that_cannot_be_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(keywords))):
        ErrorFeedback(**keywords)


def test_settings_are_frozen() -> None:
    for settings in (QuantizedComm(), Exclusions(), ErrorFeedback(), Int8Block()):
        name = dataclasses.fields(settings)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, name, None)


def test_the_plugin_is_found_by_name() -> None:
    plugin = load_plugin("quantized")
    assert isinstance(plugin, QuantizedComm)
    assert plugin.weights == Int8Block(256)
    assert plugin.gradients is None


def test_all_settings_are_part_of_the_plan() -> None:
    """Ranks that differ in any of them must not train together."""
    plain = QuantizedComm(gradients=Int8Block())
    others = [
        QuantizedComm(weights=Int8Block(128), gradients=Int8Block()),
        QuantizedComm(weights=Float8Block(), gradients=Int8Block()),
        QuantizedComm(gradients=Int4Block()),
        QuantizedComm(gradients=Int8Block(), rounding="stochastic"),
        QuantizedComm(gradients=Int8Block(), seed=1),
        QuantizedComm(gradients=Int8Block(), error_feedback=ErrorFeedback()),
        QuantizedComm(gradients=Int8Block(), exclude=Exclusions(fqns=("a",))),
        QuantizedComm(gradients=Int8Block(), hierarchical=False),
    ]
    lines = {build_stack([plugin]).lines() for plugin in (plain, *others)}
    assert len(lines) == 1 + len(others)


class OtherCodec(Plugin):
    name = "other"

    @hookimpl
    def polyshard_gather_codec(self) -> QuantizedGather:
        return QuantizedGather(Int8Block(), Exclusions(), Workspace())


def test_a_second_codec_is_refused_by_name() -> None:
    stack = build_stack([QuantizedComm(), OtherCodec()])
    with pytest.raises(ConflictError, match="other") as caught:
        stack.contributions(toys([(64, 64)], 2)[0].info)
    assert "quantized" in str(caught.value)
