"""Use the installed wheels once: import, load every plugin, one step of one rank on gloo.

Run as `python -I tools/smoke.py [DISTRIBUTION ...]` by an environment that holds nothing but the
wheels. With arguments, exactly these are installed beside core, or it fails.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from importlib.metadata import distributions, entry_points
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import polyshard

CORE = "polyshard"


def train_one_step() -> None:
    """Shard a small model over one rank, run forward and backward, step the optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    polyshard.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad is not None, name
    optimizer.step()


def check_installed(wanted: list[str]) -> None:
    """Exactly the distributions ``wanted`` stand beside core, and each can be imported."""
    names = {distribution.metadata["Name"] for distribution in distributions()}
    found = {name for name in names if name.startswith("polyshard-")}
    assert not wanted or found == set(wanted) - {CORE}, f"installed {found}, not {wanted}"
    for name in found:
        importlib.import_module(name.replace("-", "_"))


def main() -> None:
    """Fail with a traceback, or say what was used."""
    origin = Path(polyshard.__file__)
    assert origin.is_relative_to(sys.prefix), f"polyshard comes from the source tree: {origin}"
    check_installed(sys.argv[1:])
    plugins = entry_points(group="polyshard.plugins")
    for plugin in plugins:
        plugin.load()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "store").as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            train_one_step()
        finally:
            dist.destroy_process_group()
    names = ", ".join(sorted(plugins.names)) or "none"
    print(f"smoke: polyshard with torch {torch.__version__}, plugins: {names}: fine")


if __name__ == "__main__":
    main()
