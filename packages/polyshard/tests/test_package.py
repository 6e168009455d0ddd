"""The package from outside: names, what importing loads, and who asks plugins."""

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


COLLECTIVES_ALONE = """
import sys, torch, polyshard
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
for module in (*model, model):
    polyshard.fully_shard(module, mesh=mesh)
for is_last in (False, True):
    model.set_is_last_backward(is_last)
    model(torch.randn(3, 5)).sum().backward()
polyshard.clip_grad_norm_(model.parameters(), 1.0)
torch.optim.SGD(model.parameters(), lr=0.1).step()
imported = [name for name in sys.modules if name.startswith("polyshard.transport.gloo")]
assert not imported, imported
"""


def test_collectives_import_nothing_of_gloo() -> None:
    code = [sys.executable, "-W", "ignore", "-c", COLLECTIVES_ALONE]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_one_file_asks_plugins_and_none_asks_pluggy() -> None:
    """So that hooks are called through typed functions only."""
    asking = {p.name for p in SOURCE.rglob("*.py") if re.search(r"self\.ask\(", p.read_text())}
    assert asking == {"stack.py"}
    calling = {p.name for p in SOURCE.rglob("*.py") if "PluginManager" in p.read_text()}
    assert calling == set()
