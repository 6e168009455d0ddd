"""What a run comes to that no launcher started; and where the helpers of these tests are."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from launch_ranks import STEPS, Outcome, Undisturbed, by_hand


def pytest_configure() -> None:
    """SIGTERM ends the tests with their daemons and hosts, as Control-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What a run of so many ranks comes to, started by hand; each is made once."""
    made: dict[int, Outcome] = {}

    def run(ranks: int) -> Outcome:
        if ranks not in made:
            out = tmp_path_factory.mktemp(f"by-hand-{ranks}")
            assert by_hand(ranks, out, f"--steps={STEPS}") == [0] * ranks
            made[ranks] = Outcome.of(out)
        return made[ranks]

    return run
