"""Random cases on real ranks against one process; a longer session is ``nox -s fuzz``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

pytest.importorskip("polyshard_tensor_parallel")
pytest.importorskip("polyshard_quantized")
pytest.importorskip("polyshard_offload")

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks get it with the rest of sys.path

from fuzzing import run
from fuzzing.build import Flow
from fuzzing.case import Case, Clip, Fail, Leaf, Mesh, Save, Step, Train, Tree, Unit, parse
from fuzzing.draw import draw
from fuzzing.program import program
from fuzzing.session import Session
from fuzzing.shrink import candidates, shrink

from polyshard_resilience.alarm.current import current_alarm

SEED = 0
BATCHES = 2
SECONDS = 8.0
"""Of each batch; a slow machine runs fewer cases."""

SMALL = Case(
    tree=Tree(children=(Leaf(), Leaf(kind="raw", shapes=((), (5, 3)))), unit=Unit()),
    script=(Train(), Clip(), Step()),
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.close()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_cases(session: Session, batch: int) -> None:
    deadline = time.monotonic() + SECONDS
    number, ran = batch * 1000, 0
    while time.monotonic() < deadline:
        case = draw(SEED, number)
        verdict = session.check(case)
        title = f"seed {SEED}, case {number}"
        assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{program(case, title)}"
        number, ran = number + 1, ran + (verdict.kind == "passed")
    assert ran, "every case was refused or is known to fail"


def test_what_is_wrong_is_found_shrunk_and_printed(session: Session) -> None:
    """An unknown way to save stands for an error of the engine: it raises on every rank."""
    script = (*SMALL.script, Train(), Save("nonsense"))
    case = dataclasses.replace(SMALL, script=script, mesh=Mesh(1, replicas=2))
    verdict = session.check(case)
    assert verdict.kind == "raised"
    assert "nonsense" in verdict.text

    def fails(other: Case) -> bool:
        return Save("nonsense") in other.script  # as the ranks would say, but at once

    smallest = shrink(case, fails, seconds=10.0)
    assert smallest.script == (Save("nonsense"),)
    assert smallest.mesh == Mesh()
    text = program(smallest, "an example")
    compile(text, "example.py", "exec")
    assert repr(smallest) in text


def late(rank: int, size: int, text: str, folder: str) -> tuple[str, str]:
    """Run a case, but rank 0 comes to its backward when it has heard that another rank failed."""
    loss_of: Callable[[Flow, int], Tensor] = vars(run)["loss_of"]

    def late_loss_of(flow: Flow, micro: int) -> Tensor:
        while rank == 0 and current_alarm().report is None:
            time.sleep(0.01)
        patch.undo()
        return loss_of(flow, micro)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "loss_of", late_loss_of)
        return run.on_ranks(rank, size, text, folder)


def test_a_rank_that_is_slow_to_fail_hears_of_another(session: Session, tmp_path: Path) -> None:
    script = (Fail(backward=True), Train(), Step())
    case = dataclasses.replace(SMALL, script=script, mesh=Mesh(2))
    answers = session.world.run(late, repr(case), str(tmp_path))
    assert answers == [("passed", "")] * len(answers)


def test_cases_are_data() -> None:
    """The same seed and number give the same case, which is what its ``repr`` says."""
    for number in range(300):
        case = draw(7, number)
        assert case == draw(7, number)
        assert parse(repr(case)) == case
        assert all(parse(repr(smaller)) == smaller for smaller in list(candidates(case))[:5])
