"""What optimizers that look at whole tensors make of shards, and of parts given as plain tensors.

Each is written here in a few lines in the manner of a known one. See docs/how-to/optimizers.md,
whose table these tests are held against.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_whole
from torch import Tensor, nn, optim
from toy_models import full

from polyshard import fully_shard
from polyshard.errors import UnsupportedError
from polyshard_optimizers import flat
from polyshard_testing import ranks

STEPS = 3
RIGHT, REFUSED, WRONG = "right", "refused", "silently wrong"

ON_SHARDS = {
    "Lion": RIGHT,
    "Lamb": RIGHT,
    "LARS": WRONG,  # it reads norms as numbers
    "CAME": RIGHT,
    "Shampoo": RIGHT,
    "Orthogonal": RIGHT,
    "Blockwise": RIGHT,
    "Prodigy": RIGHT,
    "Muon": RIGHT,
    "Adafactor": REFUSED,
}
"""Given ``DTensor`` s. What is right may also be refused, by torch, for shards of some sizes."""

ON_PARTS = {name: RIGHT if name == "Lion" else WRONG for name in ON_SHARDS}
"""Given the parts as plain tensors (``to_local()``)."""


def kind_of(name: str) -> Any:
    return getattr(toy_whole, name, None) or getattr(optim, name)


def drawn(rows: int) -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients, by step."""
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(1 + STEPS, rows, 6, generator=generator)
    return matrix, gradients


def stepped(name: str, rows: int, parts: list[int]) -> Tensor:
    """The matrix in ``parts``, as one process steps them."""
    matrix, gradients = drawn(rows)
    parameters = [nn.Parameter(part.clone()) for part in matrix.split(parts)]
    optimizer = kind_of(name)(parameters, lr=0.1)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split(parts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def verdict(name: str, found: Tensor, whole: Tensor) -> str:
    far = 2e-2 if name == "Muon" else 1e-5  # Muon computes in bf16
    return RIGHT if (found - whole).abs().max() < far else WRONG


@pytest.mark.parametrize("name", ON_PARTS)
def test_parts_given_as_plain_tensors(name: str) -> None:
    whole, parts = stepped(name, 8, [8]), stepped(name, 8, [5, 3])
    assert verdict(name, parts, whole) == ON_PARTS[name]


def test_blocks_of_parts_are_those_of_the_whole_where_they_begin_alike() -> None:
    """Each part a multiple of 16 elements."""
    assert torch.equal(stepped("Blockwise", 16, [8, 8]), stepped("Blockwise", 16, [16]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_SHARDS)
@ranks(2)
def test_shards(rank: int, size: int, name: str) -> None:
    found = [_on_shards(name, rows) for rows in (8, 7)]
    assert found[0] == ON_SHARDS[name]
    assert found[1] in (found[0], REFUSED)


def _on_shards(name: str, rows: int) -> str:
    matrix, gradients = drawn(rows)
    model: Any = nn.Linear(6, rows, bias=False)
    with torch.no_grad():
        model.weight.copy_(matrix)
    fully_shard(model)
    optimizer = kind_of(name)(model.parameters(), lr=0.1)
    for gradient in gradients:
        (model(torch.eye(6)) * gradient.T).sum().backward()
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError):
            return REFUSED
        optimizer.zero_grad()
    return verdict(name, full(model.weight), stepped(name, rows, [rows]))


@pytest.mark.filterwarnings("ignore")
@ranks(2)
def test_lbfgs_on_shards(rank: int, size: int) -> None:
    """Its dot products are of whole parameters; shards that are not even torch cannot join."""
    for rows in (8, 7):
        matrix, (target, *_) = drawn(rows)
        results = []
        for is_sharded in (True, False):
            model: Any = nn.Linear(6, rows, bias=False)
            with torch.no_grad():
                model.weight.copy_(matrix)
            if is_sharded:
                fully_shard(model)
            optimizer: Any = optim.LBFGS(model.parameters(), lr=0.3, max_iter=5)

            def closure(model: Any = model, target: Tensor = target) -> Any:
                model.zero_grad()
                loss = (model(torch.eye(6)) - target.T).pow(4).sum()
                loss.backward()
                return loss

            try:
                optimizer.step(closure)
            except (RuntimeError, NotImplementedError):
                assert rows == 7
                break
            results.append(full(model.weight).detach())
        else:
            assert (results[0] - matrix).abs().max() > 0.1
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["Lamb", "LARS", "CAME", "Shampoo", "Prodigy"])
def test_flat_knows_names_of_others(name: str) -> None:
    kind = kind_of(name)
    for is_declared in (False, True):
        with pytest.raises(UnsupportedError, match=f"{name} cannot be stepped in runs: it .*name"):
            flat(kind([nn.Parameter(torch.ones(4, 4))]), elementwise=is_declared)
    derived = type("Mine", (kind,), {})([nn.Parameter(torch.ones(4, 4))])
    assert flat(derived, elementwise=True) is derived


def test_flat_takes_elementwise_ones_by_word() -> None:
    results = []
    for is_flat in (False, True):
        matrix, gradients = drawn(8)
        parameters = [nn.Parameter(row.clone()) for row in matrix]
        optimizer = toy_whole.Lion(parameters)
        if is_flat:
            flat(optimizer, elementwise=True)
        for gradient in gradients:
            for parameter, row in zip(parameters, gradient, strict=True):
                parameter.grad = row.clone()
            optimizer.step()
        results.append(torch.stack([p.detach() for p in parameters]))
    assert torch.equal(*results)
