"""Generated import forms: afterwards every name is what it was, or polyshard's of that name."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given, settings
from migrate_runs import migrated

import polyshard
from polyshard_cli.migrate.terms import fsdp1, fsdp2

MOVED = [term.theirs for term in fsdp2.NAMES.terms]
STAY = [term.theirs for term in fsdp1.NAMES.terms]
HOMES = ["torch.distributed.fsdp", "torch.distributed._composable.fsdp"]
COMMENT = st.sampled_from(["", "  # why", "  # noqa: F401"])


@st.composite
def named(draw: st.DrawFn, number: int) -> tuple[str, list[str]]:
    """``from torch.distributed.fsdp import a as b, c``: the statement, and what it binds."""
    names = draw(st.lists(st.sampled_from(MOVED + STAY), min_size=1, max_size=4, unique=True))
    aliases = {name: f"{name}_{number}" if draw(st.booleans()) else name for name in names}
    written = [n if n == bound else f"{n} as {bound}" for n, bound in aliases.items()]
    if draw(st.booleans()):
        comment = draw(COMMENT)
        last = draw(st.sampled_from([",", ""]))
        lines = [f"    {each},{comment}\n" for each in written[:-1]]
        text = f"(\n{''.join(lines)}    {written[-1]}{last}\n)"
    else:
        text = ", ".join(written)
    return f"from {HOMES[0]} import {text}{draw(COMMENT)}\n", list(aliases.values())


@st.composite
def through_module(draw: st.DrawFn, number: int) -> tuple[str, list[str]]:
    """A module, and expressions that reach names through it."""
    names = draw(st.lists(st.sampled_from(MOVED), min_size=1, max_size=3))
    forms = {
        f"import torch.distributed.fsdp as module_{number}": f"module_{number}",
        f"from torch.distributed import fsdp as module_{number}": f"module_{number}",
        f"import torch.distributed as dist_{number}": f"dist_{number}.fsdp",
        "import torch.distributed.fsdp": "torch.distributed.fsdp",
    }
    form = draw(st.sampled_from(sorted(forms)))
    uses = [f"used_{number}_{at} = {forms[form]}.{name}" for at, name in enumerate(names)]
    bound = [f"used_{number}_{at}" for at in range(len(uses))]
    return "\n".join([form, *uses]) + "\n", bound


@st.composite
def scripts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Several statements, some below ``if True:``."""
    text = ""
    bound: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        part, names = draw(st.one_of(named(number), through_module(number)))
        if draw(st.booleans()):
            part = "if True:\n" + "".join(f"    {line}\n" for line in part.splitlines())
        text, bound = text + part, bound + names
    return text, bound


COMMENTED = """from torch.distributed.fsdp import (
    fully_shard,  # moves
    FullyShardedDataParallel,  # stays
    MixedPrecisionPolicy  # moves, and no comma
)
"""


@settings(max_examples=40, deadline=None)
@given(script=scripts())
@example(script=(COMMENTED, ["fully_shard", "FullyShardedDataParallel", "MixedPrecisionPolicy"]))
@example(script=(COMMENTED.replace("MixedPrecisionPolicy", "ShardingStrategy"), ["fully_shard"]))
def test_every_bound_name_still_resolves(script: tuple[str, list[str]]) -> None:
    text, bound = script
    found = migrated(text)  # twice, and the second time changes nothing
    before, after = names_of(text), names_of(found.text)
    for name in bound:
        home = getattr(before[name], "__name__", name)
        original = home if home in MOVED + STAY else name.rpartition("_")[0] or name
        if original in MOVED:
            assert after[name] is getattr(polyshard, original), (name, found.text)
        else:
            assert after[name] is before[name], (name, found.text)
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert all(comment in found.text for comment in comments)


def names_of(text: str) -> dict[str, Any]:
    """What running ``text`` binds."""
    names: dict[str, Any] = {}
    exec(compile(ast.parse(text), "script.py", "exec"), names)
    return names


def test_the_homes_of_names_are_there() -> None:
    for home in HOMES:
        assert hasattr(importlib.import_module(home), "fully_shard")
