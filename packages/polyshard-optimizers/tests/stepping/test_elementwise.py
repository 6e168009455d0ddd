"""The table of optimizers is held against torch's own: what they are, and what they compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from polyshard.errors import LifecycleError, SettingError, UnsupportedError
from polyshard_optimizers import flat
from polyshard_optimizers.stepping.elementwise import ELEMENTWISE, NOT_ELEMENTWISE, OF_OTHERS

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "optimizers.md"

OWN = sorted(
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
)


def test_the_table_knows_every_optimizer_of_torch() -> None:
    assert set(OWN) <= {*ELEMENTWISE, *NOT_ELEMENTWISE}
    assert not set(ELEMENTWISE) & set(NOT_ELEMENTWISE)
    assert set(ELEMENTWISE) <= set(OWN)


def rows_of(heading: str) -> list[tuple[set[str], str]]:
    """Names and last column of each row of the page's table that begins with ``heading``."""
    table = PAGE.read_text(encoding="utf-8").split(f"| {heading} |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(set(row[0].split(", ")), row[-1]) for row in rows]


def test_the_page_says_what_the_table_does() -> None:
    own = rows_of("optimizer of `torch.optim`")
    flat_ones = [names for names, answer in own if answer == "steps runs"]
    refused = [names for names, answer in own if answer.startswith("refuses")]
    assert flat_ones == [set(ELEMENTWISE)]
    assert set().union(*refused) == set(NOT_ELEMENTWISE)
    assert len(own) == len(flat_ones) + len(refused)
    others = rows_of("written like")
    by_name = [names for names, answer in others if answer == "refuses, by name"]
    assert sorted(map(sorted, by_name)) == sorted(map(sorted, OF_OTHERS.values()))
    assert len(others) == len(by_name) + 2


def test_sparse_adam_refuses_dense_gradients() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = optim.SparseAdam([parameter])
    parameter.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()


def test_lbfgs_is_silently_wrong_on_parts() -> None:
    """Two ranks, each with dot products of its own."""
    results = []
    for splits in ([6], [3, 3]):
        parts = [nn.Parameter(torch.ones(n)) for n in splits]
        optimizers = [optim.LBFGS([p], lr=0.1, max_iter=3) for p in parts]
        factors = torch.arange(1.0, 7.0).split(splits)
        for optimizer, part, factor in zip(optimizers, parts, factors, strict=True):

            def closure(part: Any = part, factor: Any = factor) -> Any:
                part.grad = None
                loss = (factor * part.square()).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        results.append(torch.cat([part.detach() for part in parts]))
    assert (results[0] - results[1]).abs().max() > 1e-3


def stepped(make: Callable[[Any], Optimizer], rows: Sequence[int]) -> Tensor:
    """A matrix after some steps, given to the optimizer in parts of ``rows``."""
    generator = torch.Generator().manual_seed(0)
    parts = [nn.Parameter(p) for p in torch.randn(8, 6, generator=generator).split(list(rows))]
    optimizer = make(parts)
    for _ in range(4):
        gradient = torch.randn(8, 6, generator=generator)
        for part, own in zip(parts, gradient.split(list(rows)), strict=True):
            part.grad = own.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_means_that_parts_make_the_whole(name: str) -> None:
    make = lambda parts: getattr(optim, name)(parts, lr=0.1)  # noqa: E731
    assert torch.equal(stepped(make, [8]), stepped(make, [3, 4, 1]))


@pytest.mark.parametrize("name", [n for n in ("Adafactor", "Muon") if hasattr(optim, n)])
def test_the_others_are_silently_wrong_on_parts(name: str) -> None:
    make = lambda parts: getattr(optim, name)(parts, lr=0.1)  # noqa: E731
    whole, parts = stepped(make, [8]), stepped(make, [4, 4])
    assert (whole - parts).abs().max() > 1e-3


@pytest.mark.parametrize("name", [n for n in NOT_ELEMENTWISE if hasattr(optim, n)])
def test_the_others_are_refused_with_the_reason(name: str) -> None:
    kind = getattr(optim, name)
    optimizer = kind([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(UnsupportedError, match=f"{name} cannot be stepped in runs: it "):
        flat(optimizer)
    derived = type("Mine", (kind,), {})([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(UnsupportedError, match="Mine cannot be stepped in runs: it "):
        flat(derived, elementwise=True)


class Mine(optim.Adam):
    """What it computes is not known."""


class Shaped(Optimizer):
    """Keeps a value for each tensor: not elementwise, whatever its user says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["norms"] = torch.ones(3)


def test_classes_nobody_knows_are_refused_unless_declared() -> None:
    params = [nn.Parameter(torch.ones(4))]
    with pytest.raises(UnsupportedError, match=r"Mine is not among .* flat\(optimizer, elementwis"):
        flat(Mine(params))
    optimizer = flat(Mine(params), elementwise=True)
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert params[0].max() < 1.0
    shaped = flat(Shaped(params), elementwise=True)
    with pytest.raises(UnsupportedError, match=r"Shaped keeps 'norms' of shape \(3,\) for 4"):
        shaped.step()


def test_other_refusals() -> None:
    params = [nn.Parameter(torch.ones(4))]
    with pytest.raises(SettingError, match=r"takes a torch\.optim\.Optimizer, got int"):
        flat(3)  # type: ignore[type-var]
    with pytest.raises(UnsupportedError, match=r"Adam\(differentiable=True\)"):
        flat(optim.Adam(params, differentiable=True))
    with pytest.raises(UnsupportedError, match=r"Adam\(differentiable=True\)"):
        flat(optim.Adam([{"params": params, "differentiable": True}]))
    optimizer = optim.SGD(params, 0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(LifecycleError, match="Call flat first and make the scheduler"):
        flat(optimizer)


def test_the_object_and_its_class_stay() -> None:
    given = optim.AdamW([nn.Parameter(torch.ones(4))])
    groups = given.param_groups
    optimizer = flat(given)
    assert optimizer is given
    assert flat(optimizer) is given
    assert isinstance(optimizer, optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is groups
