"""Every cell of the table of combinations, on real ranks, against one process."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from one_process import OneProcess, like_a_rank, outcome_of
from refusals import CASES, refused
from sharded import Found, reloaded, returned, trained
from small_model import build, loss_of
from torch import Tensor
from training import EVALUATION, Outcome

from composition_table import CELLS, PLUGINS, REFUSALS, Agreement, Cell, Refusal
from polyshard_testing import World
from subsets import NEUTRAL, short, stack_of

APART = set(map(short, NEUTRAL))


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(f"polyshard_{name.replace('-', '_')}") is not None


INSTALLED = tuple(filter(is_installed, PLUGINS))


def is_chosen(row: Cell | Refusal, config: pytest.Config) -> bool:
    """A session asks for one stack; without one, everything that is installed is tested."""
    if isinstance(row, Refusal) and set(row.absent) & set(INSTALLED):
        return False
    asked = config.getoption("--stack")
    if APART & set(row.stack):  # with whatever is installed beside: there is no stack of theirs
        return all(map(is_installed, row.stack)) and asked in (None, stack_of(INSTALLED))
    return set(row.stack) <= set(INSTALLED) if asked is None else stack_of(row.stack) == asked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, table in (("cell", CELLS), ("refusal", REFUSALS)):
        if name in metafunc.fixturenames:
            chosen = [row for row in table if is_chosen(row, metafunc.config)]
            metafunc.parametrize(
                name, [pytest.param(r, id=r.id, marks=marks_of(r)) for r in chosen]
            )


def marks_of(row: Cell | Refusal) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.thorough,) if isinstance(row, Cell) and row.is_thorough else ()


def test_what_is_installed_is_what_was_asked_for(pytestconfig: pytest.Config) -> None:
    asked = pytestconfig.getoption("--stack")
    if asked is not None:
        assert stack_of(INSTALLED) == asked, "this session tests what composes with nothing else"


@cache
def expected(cell: Cell) -> Outcome:
    """The oracle's outcome; computed once where cells differ in what changes no bit."""
    return outcome_of(cell)


def oracle_for(cell: Cell) -> Outcome:
    """Where things rest, and who applies a plan of one rank, are nothing to one process."""
    lossy = tuple(name for name in cell.stack if name == "quantized")
    return expected(replace(cell, stack=lossy))


def on(size: int, worlds: tuple[World, World]) -> World:
    return next(world for world in worlds if world.size == size)


@pytest.mark.sampled(3)
def test_cell(cell: Cell, world2: World, world4: World, tmp_path: Path) -> None:
    worlds, oracle = (world2, world4), oracle_for(cell)
    found = on(cell.layout.ranks, worlds).run(trained, cell, str(tmp_path), timeout=180.0)
    assert len({digest for _, _, digest in found}) == 1, "ranks hold different parameters"
    assert {part for part, _, _ in found} == set(range(cell.layout.parts))
    for part, outcome, _ in found:
        mine = [each[part] for each in oracle.losses]
        assert_numbers(cell, [loss for (loss,) in outcome.losses], mine)
        assert_numbers(cell, outcome.norms, oracle.norms, exact=False)
    initial = dict(build(cell).named_parameters())
    assert found[0][1].tensors.keys() == oracle.tensors.keys()
    for name, value in oracle.tensors.items():
        assert_tensor(cell, name, found[0][1].tensors[name], value, initial.get(name))
    if cell.feature == "reload":
        other = on(6 - cell.layout.ranks, worlds)
        assert_reloaded(cell, found, other.run(reloaded, cell, str(tmp_path)))
        again = on(cell.layout.ranks, worlds).run(returned, cell, str(tmp_path))
        assert set(again) == {found[0][2]}


def assert_numbers(
    cell: Cell, found: list[float], oracle: list[float], *, exact: bool = True
) -> None:
    if cell.agreement is Agreement.BITS and exact:
        assert found == oracle
    else:
        assert found == pytest.approx(oracle, rel=cell.tolerance, abs=0.0)


def assert_tensor(
    cell: Cell, name: str, found: Tensor, oracle: Tensor, initial: Tensor | None
) -> None:
    """Relative to the 2-norm; squares of gradients as what they are squares of."""
    if cell.agreement is Agreement.BITS:
        assert torch.equal(found, oracle), name
        return
    if name.endswith("exp_avg_sq"):
        found, oracle = found.sqrt(), oracle.sqrt()
    elif initial is not None and cell.agreement is Agreement.FORMAT:
        start = initial.detach()  # what was trained, not what was there before
        found, oracle = found - start, oracle - start
    error = ((found - oracle).norm() / oracle.norm()).item()
    assert error <= cell.tolerance, f"{name}: differs by {error:.1e}"


def assert_reloaded(cell: Cell, saved: list[Found], loaded: list[Found]) -> None:
    """Every bit, of parameters and optimizer state; and the model computes with them."""
    assert {digest for _, _, digest in loaded} == {saved[0][2]}
    model = build(cell)
    values = loaded[0][1].tensors
    with like_a_rank(), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
        assert loaded[0][1].losses == [[loss_of(model, EVALUATION, 0).item()]]


def test_the_oracle_notices_what_the_cells_are_about() -> None:
    """Features and formats change what is compared: a stack that ignored one would fail."""
    plain = next(cell for cell in CELLS if cell.id == "core-fsdp-fp32-plain")
    outcomes = [
        oracle_for(replace(plain, feature=f)) for f in ("plain", "accumulation", "clipping")
    ]
    outcomes.append(oracle_for(replace(plain, dtype="bf16")))
    if "quantized" in INSTALLED:
        outcomes.append(oracle_for(replace(plain, stack=("quantized",))))
    for index, one in enumerate(outcomes):
        for other in outcomes[:index]:
            assert any(not torch.equal(one.tensors[n], v) for n, v in other.tensors.items())
    assert OneProcess(plain).tensors().keys() < outcomes[0].tensors.keys()


def test_refusal(refusal: Refusal, world4: World, tmp_path: Path) -> None:
    """On every rank, the class and the words that the page shows."""
    answers = world4.run(refused, refusal.id, str(tmp_path))
    assert {kind for kind, _ in answers} == {refusal.error}, answers
    for _, message in answers:
        assert refusal.words in message


def test_every_refusal_is_provoked() -> None:
    assert {refusal.id for refusal in REFUSALS} == set(CASES)
