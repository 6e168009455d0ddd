"""Where the frameworks are not installed, names say what to install."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "accelerate" else found(name, *rest)
import polyshard_accelerate
assert polyshard_accelerate.Sharding().units == ()
for name in ("PolyshardAccelerator", "PolyshardTrainer"):
    try:
        getattr(polyshard_accelerate, name)
    except ImportError as error:
        print(error)
"""


def test_what_to_install_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    for extra in ("accelerate", "transformers"):
        assert f"pip install 'polyshard-accelerate[{extra}]'" in done.stdout
