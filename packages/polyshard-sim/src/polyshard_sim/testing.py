"""Functions on real ranks with a simulated device each; needs the extra ``polyshard-sim[testing]``.

def check(rank: int, size: int) -> None: ...

def test_something() -> None:
    for mode in MODES:
        run(check, 2, mode=mode)
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from polyshard.testing import World
from polyshard_sim.building import extension
from polyshard_sim.enabling import Mode, enable

__all__ = ["MODES", "Mode", "run", "sim"]

MODES: tuple[Mode, ...] = get_args(Mode)
"""All modes; a mistake may show in one of them only."""


def sim() -> Any:
    """``torch.sim``, which type checkers do not know."""
    return torch.get_device_module("sim")


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    collective_seconds: float = 30.0,
    timeout: float | None = 60.0,
    **settings: Any,
) -> list[Any]:
    """Call ``function(rank, size, *args)`` on ranks of their own, each with a device ``sim``.

    The ranks are in a process group ``cpu:gloo,sim:simccl``, and device 0 is current. Their
    processes end with the call, because a process can enable the device once.

    Args:
        function: a module-level function.
        world_size: the number of ranks.
        args: picklable.
        collective_seconds: the group's time-out.
        timeout: seconds after which ranks that have not answered count as hung.
        settings: of :func:`polyshard_sim.enable`: ``mode``, ``seed``, ``strict``, ...

    Returns:
        What each rank returned, by rank; not tensors on ``sim``.

    Raises:
        polyshard.testing.RankError: when any rank raised or hung.
    """
    extension()  # compiled once here, not by each rank within its time
    world = World(world_size, collective_seconds)
    with tempfile.TemporaryDirectory(prefix="polyshard-sim-") as folder:
        store = str(Path(folder) / "store")
        name = (inspect.getfile(function), function.__qualname__)
        try:
            return world.run(
                _on_device, name, args, store, collective_seconds, settings, timeout=timeout
            )
        finally:
            world.close()


def _on_device(
    rank: int,
    size: int,
    name: tuple[str, str],
    args: tuple[Any, ...],
    store: str,
    seconds: float,
    settings: dict[str, Any],
) -> Any:
    enable(**settings)
    torch.accelerator.set_device_index(0)
    dist.destroy_process_group()  # of the CPU alone
    dist.init_process_group(
        "cpu:gloo,sim:simccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    torch.manual_seed(0)
    result = _load(*name)(rank, size, *args)
    torch.accelerator.synchronize()
    return result


def _load(path: str, name: str) -> Callable[..., Any]:
    """A function of a file that need not be importable."""
    module_name = f"_polyshard_sim_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(path).parent))  # helpers beside the test file
    spec.loader.exec_module(module)
    function: Callable[..., Any] = inspect.unwrap(getattr(module, name))
    return function
