"""Where the frameworks are not installed, names say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "accelerate" else found(name, *rest)
import polyshard_accelerate
assert polyshard_accelerate.Sharding().units == ()
from polyshard_accelerate import {name}
"""


@pytest.mark.parametrize(
    ("name", "extra"),
    [("PolyshardAccelerator", "accelerate"), ("PolyshardTrainer", "transformers")],
)
def test_what_to_install_is_said(name: str, extra: str) -> None:
    code = CODE.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'polyshard-accelerate[{extra}]'" in done.stderr
