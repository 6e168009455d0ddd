"""The example of the repository runs as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "publish.py"


@pytest.mark.thorough
def test_the_example_publishes_what_it_trained() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    found = subprocess.run([*torchrun, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "version 4: " in found.stdout
    assert found.stdout.count("differs by 0.0") == 5
