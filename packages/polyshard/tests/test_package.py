"""The package from outside: names, what importing loads, and who talks to pluggy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyshard

SOURCE = Path(polyshard.__file__).parent


@pytest.mark.parametrize("name", polyshard.__all__)
def test_public_names_exist_and_are_listed(name: str) -> None:
    assert getattr(polyshard, name) is not None
    assert name in dir(polyshard)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'polyshard' has no attribute 'fuly_shard'"):
        polyshard.fuly_shard  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", ["polyshard", "polyshard.plugins.contract"])
def test_declaring_a_plugin_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_file_asks_plugins_and_pluggy() -> None:
    """So that hooks are called through typed functions only."""
    asking = {p.name for p in SOURCE.rglob("*.py") if re.search(r"self\.ask\(", p.read_text())}
    assert asking == {"stack.py"}
    calling = {p.name for p in SOURCE.rglob("*.py") if "PluginManager" in p.read_text()}
    assert calling == {"member.py"}
