"""Where Lightning is not installed, the name says what to install."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lightning" else found(name, *rest)
import polyshard_lightning
assert polyshard_lightning.__version__
from polyshard_lightning import PolyshardStrategy
"""


def test_what_to_install_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'polyshard-lightning[lightning]'" in done.stderr
