"""Each warning appears where it holds, and not beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from polyshard_plan import Document, Settings, draft, parse_mesh

DEMO = Settings(model="demo:small", mesh=parse_mesh("dp=2"), batch=16)


def codes(document: Document) -> set[str]:
    return {notice.code for notice in document.notices}


def odd_vocabulary() -> nn.Module:
    return nn.Sequential(nn.Embedding(50257, 8), nn.ModuleList([nn.Linear(8, 8)]))


def test_a_plan_without_trouble_warns_of_none_of_it() -> None:
    found = codes(draft(DEMO))
    assert found.isdisjoint({"tiny-shards", "padding", "odd-vocabulary", "memory", "one-unit"})


def test_too_many_ranks_make_tiny_shards_and_padding() -> None:
    many = replace(DEMO, mesh=parse_mesh("dp=512"), batch=0)
    assert {"tiny-shards", "padding"} <= codes(draft(many))


def test_odd_vocabularies() -> None:
    document = draft(Settings(model="test_advice:odd_vocabulary", mesh=parse_mesh("dp=2")))
    (notice,) = (n for n in document.notices if n.code == "odd-vocabulary")
    assert "50,257 rows" in notice.message
    assert "50,304 rows" in notice.message


def test_one_unit_holds_all() -> None:
    whole = draft(Settings(model="test_advice:one_layer", mesh=parse_mesh("dp=2")))
    assert "one-unit" in codes(whole)


def one_layer() -> nn.Module:
    return nn.Linear(64, 64)


def test_codecs_that_do_not_pay() -> None:
    pytest.importorskip("polyshard_quantized")
    fast = draft(replace(DEMO, quantize="int8"))
    assert "codec-below-break-even" in codes(fast) or "codec-without-effect" in codes(fast)
    tiny = draft(replace(DEMO, model="demo:tiny", quantize="int8"))
    assert "codec-without-effect" in codes(tiny)
