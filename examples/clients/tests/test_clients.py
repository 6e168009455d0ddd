"""Every loop prints the same losses under both engines, bitwise."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
LOSS = re.compile(r"^loss (\S+)$", re.MULTILINE)
TITAN = ("torchtitan", "triton")  # which it imports, GPU or not

LOOPS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "lightning": (("lightning",), ["with_lightning.py"]),
    "accelerate": (("accelerate", "transformers"), ["with_accelerate.py"]),
    "trainer": (("accelerate", "transformers"), ["with_trainer.py"]),
    "peft": (("peft", "transformers"), ["with_peft.py"]),
    "torchao-float8": (("torchao",), ["with_torchao.py", "--kind=float8"]),
    "torchao-int8": (("torchao",), ["with_torchao.py", "--kind=int8"]),
    "pipelining": ((), ["with_pipelining.py"]),
    "titan": (TITAN, ["with_torchtitan.py", "--checkpointing=none"]),
    "titan-full": (TITAN, ["with_torchtitan.py", "--checkpointing=full"]),
    "titan-selective": (TITAN, ["with_torchtitan.py", "--checkpointing=selective"]),
    "titan-compiled": (TITAN, ["with_torchtitan.py", "--checkpointing=full", "--compile"]),
}
CASES = [pytest.param(*case, id=name) for name, case in LOOPS.items()]


@pytest.mark.parametrize(("needed", "command"), CASES)
def test_both_engines_print_the_same_losses(needed: tuple[str, ...], command: list[str]) -> None:
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    losses = {
        engine: losses_of([*command, "--engine", engine]) for engine in ("polyshard", "torch")
    }
    assert losses["polyshard"] == losses["torch"]
    assert len(losses["torch"]) >= 4
    assert len(set(losses["torch"])) > 1, "nothing was trained"


def losses_of(command: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return LOSS.findall(done.stdout)
