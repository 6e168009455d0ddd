"""How thoroughly faults are tried, and what a run without any comes to."""

from __future__ import annotations

from pathlib import Path

import fault_jobs
import pytest
from fault_jobs import Undisturbed, training


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kills`` and ``--kill-seed``; ``--all-hosts`` for what CI has no time for."""
    group = parser.getgroup("faults")
    group.addoption("--kills", type=int, default=1, help="how often a rank is killed")
    group.addoption("--kill-seed", type=int, default=0, help="decides which, and when")
    group.addoption("--all-hosts", action="store_true", help="every fault of several hosts")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Directories of runs that nothing happens to; each is made once."""
    made: dict[object, Path] = {}

    def run(steps: int, ranks: int = 2, *options: str) -> Path:
        what = (steps, ranks, options)
        if what not in made:
            out = tmp_path_factory.mktemp("undisturbed")
            fault_jobs.undisturbed([*training(out, steps), *options], ranks)
            made[what] = out
        return made[what]

    return run
