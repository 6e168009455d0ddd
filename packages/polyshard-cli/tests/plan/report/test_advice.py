"""Each warning appears where it holds, and not beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyshard_cli.plan import Document, Settings, draft, parse_mesh
from polyshard_cli.plan.estimate.machines import MACHINES, Link, save_machine

DEMO = Settings(model="demo:small", mesh=parse_mesh("dp=2"), batch=16)


def codes(document: Document) -> set[str]:
    return {notice.code for notice in document.notices}


def test_a_plan_without_trouble_warns_of_none_of_it() -> None:
    found = codes(draft(DEMO))
    assert found.isdisjoint({"tiny-shards", "padding", "odd-vocabulary", "memory", "one-unit"})


def test_too_many_ranks_make_tiny_shards_and_padding() -> None:
    many = replace(DEMO, mesh=parse_mesh("dp=512"), batch=0)
    assert {"tiny-shards", "padding"} <= codes(draft(many))


def test_odd_vocabularies() -> None:
    document = draft(Settings(model="plan_models:odd_vocabulary", mesh=parse_mesh("dp=2")))
    (notice,) = (n for n in document.notices if n.code == "odd-vocabulary")
    assert "50,257 rows" in notice.message
    assert "50,304 rows" in notice.message


def test_one_unit_holds_all() -> None:
    whole = draft(Settings(model="plan_models:one_layer", mesh=parse_mesh("dp=2")))
    assert "one-unit" in codes(whole)


def test_codecs_are_weighed_against_the_link(tmp_path: Path) -> None:
    pytest.importorskip("polyshard_quantized")
    path = tmp_path / "machine.json"
    slow_memory = replace(MACHINES["h100x8"], memory_bytes_per_second=1e9)
    save_machine(slow_memory, path)
    quantized = replace(DEMO, quantize="int8", machine=str(path))
    assert "codec-below-break-even" in codes(draft(quantized))
    save_machine(replace(slow_memory, inside=Link(1e7, 0.0)), path)
    assert "codec-below-break-even" not in codes(draft(quantized))


def test_codecs_without_effect() -> None:
    pytest.importorskip("polyshard_quantized")
    tiny = draft(replace(DEMO, model="demo:tiny", quantize="int8"))
    assert "codec-without-effect" in codes(tiny)


def test_what_does_not_fit_a_device(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(replace(MACHINES["h100x8"], memory_bytes=1 << 20), path)
    document = draft(replace(DEMO, machine=str(path)))
    (notice,) = (n for n in document.notices if n.code == "memory")
    assert "1.0 MiB of a device" in notice.message
