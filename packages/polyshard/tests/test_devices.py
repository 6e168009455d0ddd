"""Tensors of ours are where they belong, whatever device a user's ``with torch.device`` names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from toy_models import build, full, loss_of, shard, tokens_for

import polyshard
from polyshard import fully_shard
from polyshard_testing import ranks

ROOT = Path(__file__).parents[3]
FACTORIES = {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}


def without_device(tree: ast.AST) -> Iterator[int]:
    """Lines of calls such as ``torch.empty(3)``, which follow the surrounding device."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        module = node.func.value
        is_torch = isinstance(module, ast.Name) and module.id == "torch"
        named = {keyword.arg for keyword in node.keywords}  # None is the name of what ** unpacks
        if is_torch and node.func.attr in FACTORIES and not named & {"device", None}:
            yield node.lineno


def test_every_factory_call_names_its_device() -> None:
    """``torch.get_default_device()`` says that following the surrounding one is meant."""
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in without_device(ast.parse(path.read_text()))
    ]
    assert found == []
    assert list(without_device(ast.parse("torch.zeros(\n3)\ntorch.ones(3, device=d)"))) == [1]


@ranks(2)
def test_a_surrounding_device_changes_nothing(rank: int, size: int) -> None:
    plain = shard(build(), fully_shard)
    loss_of(plain, tokens_for(0, rank)).backward()
    expected = polyshard.clip_grad_norm_(plain.parameters(), 1.0)
    model, tokens = build(), tokens_for(0, rank)
    with torch.device("meta"):
        shard(model, fully_shard)
        loss_of(model, tokens).backward()
        norm = polyshard.clip_grad_norm_(model.parameters(), 1.0)
        loss_of(model, tokens).backward()
        polyshard.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        assert polyshard.clip_grad_norm_(model.parameters(), 1.0) == 0
        polyshard.plugin_state_dict(model)
        str(polyshard.describe(model))
    assert torch.equal(norm, expected)
    for found, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(found), full(other))
