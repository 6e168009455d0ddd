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
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
import torch.distributed as dist

from polyshard_sim.building import extension
from polyshard_sim.enabling import Mode, enable
from polyshard_testing import World
from polyshard_testing.world import CALL_SECONDS, COLLECTIVE_SECONDS

__all__ = ["MODES", "Mode", "Ranks", "run", "sim"]

MODES: tuple[Mode, ...] = get_args(Mode)
"""All modes; a mistake may show in one of them only."""


def sim() -> Any:
    """``torch.sim``, which type checkers do not know."""
    return torch.get_device_module("sim")


class Ranks:
    """Processes with a device ``sim`` each, in one process group ``cpu:gloo,sim:simccl``.

    They stay from call to call until one fails; a process can enable one setting of the device.
    """

    def __init__(
        self, size: int, *, collective_seconds: float = COLLECTIVE_SECONDS, **settings: Any
    ) -> None:
        """``size`` ranks, which start with the first :meth:`run`.

        Args:
            size: the number of ranks.
            collective_seconds: the group's time-out.
            settings: of :func:`polyshard_sim.enable`: ``mode``, ``seed``, ``strict``, ... With
                ``clock`` there is no process group.
        """
        extension()  # compiled once here, not by each rank within its time
        self._world = World(size, collective_seconds)
        self._seconds, self._settings = collective_seconds, settings
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = CALL_SECONDS
    ) -> Any:
        """Call ``function(rank, size, *args)`` on each, as :func:`run` does."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="polyshard-sim-")
            store = str(Path(self._folder.name) / "store")
            self._run(_begin, store, self._seconds, self._settings, timeout=timeout)
        name = (inspect.getfile(function), function.__qualname__)
        return self._run(_on_device, name, args, timeout=timeout)

    def _run(self, function: Callable[..., Any], *args: Any, timeout: float | None) -> Any:
        try:
            return self._world.run(function, *args, timeout=timeout)
        except BaseException:  # the world has replaced its processes: these begin anew
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a later :meth:`run` starts new ones."""
        self._world.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = CALL_SECONDS,
    **settings: Any,
) -> list[Any]:
    """Call ``function(rank, size, *args)`` on :class:`Ranks` of their own.

    Device 0 is current. The processes end with the call, because a process can enable the device
    once.

    Args:
        function: a module-level function.
        world_size: the number of ranks.
        args: picklable.
        timeout: seconds after which ranks that have not answered count as hung.
        settings: of :class:`Ranks`.

    Returns:
        What each rank returned, by rank; not tensors on ``sim``.

    Raises:
        polyshard_testing.RankError: when any rank raised or hung.
    """
    ranks = Ranks(world_size, **settings)
    try:
        answers: list[Any] = ranks.run(function, *args, timeout=timeout)
        return answers
    finally:
        ranks.close()


def _begin(rank: int, size: int, store: str, seconds: float, settings: dict[str, Any]) -> None:
    enable(**settings)
    torch.accelerator.set_device_index(0)
    dist.destroy_process_group()  # of the CPU alone
    if settings.get("clock") is not None:
        return  # see clock.rank_of
    timeout, shared = timedelta(seconds=seconds), dist.FileStore(store, size)
    shared.set_timeout(timeout)
    dist.init_process_group(
        "cpu:gloo,sim:simccl", store=shared, rank=rank, world_size=size, timeout=timeout
    )


def _on_device(rank: int, size: int, name: tuple[str, str], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    result = _load(*name)(rank, size, *args)
    torch.accelerator.synchronize()
    return result


def _load(path: str, name: str) -> Callable[..., Any]:
    """A function of a file that need not be importable."""
    function: Callable[..., Any] = inspect.unwrap(getattr(_module(path), name))
    return function


@cache
def _module(path: str) -> ModuleType:
    name = f"_polyshard_sim_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))  # helpers beside the test file
    spec.loader.exec_module(module)
    return module
