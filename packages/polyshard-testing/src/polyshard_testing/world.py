"""Real gloo ranks for tests: started once, used by many tests, honest about failures.

    def check(rank: int, size: int) -> None: ...

    def test_something(world2: World) -> None:
        world2.run(check)

A function is named to the ranks by file and name, so test modules need not be importable.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polyshard_testing import late_rank

if TYPE_CHECKING:  # only who starts ranks needs torch
    import torch.distributed as dist
    from torch import Tensor

_HOST = "127.0.0.1"
COLLECTIVE_SECONDS = 60.0
"""How long a rank waits for its peers by default."""
CALL_SECONDS = 120.0
"""How long all ranks have for a call by default."""
_ANSWER_SECONDS = 5.0  # for a rank to tell that it waited in vain
_CALLS_OF_A_RANK = 300
# A rank that imports these itself takes a second of a core for it, at each start. What ranks run
# is in files of tests, which import pytest.
_PRELOADED = [
    "hypothesis",
    "polyshard.api",
    "polyshard_resilience",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
]
_STACKS_SECONDS = 1.0  # for a rank to write where it is
_STACKS_CHARACTERS = 4_000  # the last ones: the main thread's
_START_SECONDS = 120.0  # for the ranks to import torch and find each other, on a busy machine


class RankError(AssertionError):
    """Some ranks failed; the message holds the traceback of each."""


@dataclass(frozen=True)
class _Call:
    path: str
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str = ""
    groups: int = 1
    """How many process groups the rank has then."""


@dataclass(frozen=True)
class _Rank:
    rank: int
    size: int
    port: int
    """Of the store that the test's process keeps for the ranks."""
    folder: str
    seconds: float
    device: str


class World:
    """A set of processes in one gloo process group, reused from test to test.

    After a failure the processes are replaced, because peers of a failed rank may be stuck.
    """

    def __init__(
        self,
        size: int,
        collective_seconds: float = COLLECTIVE_SECONDS,
        start_method: str = "forkserver",
        device: str = "cpu",
    ) -> None:
        """``size`` ranks; they start with the first :meth:`run`.

        A rank waits ``collective_seconds`` for its peers before it raises. Those of a
        ``forkserver`` start at once, since torch is imported there once for all; ``spawn`` makes
        processes that share no memory with others, for measurements of it. On another ``device``
        than the CPU that one is the default, and its usual backend serves it beside gloo; ``"sim"``
        is the simulated one of polyshard-sim.
        """
        self.size = size
        self._seconds = collective_seconds
        self._start_method = start_method
        self._device = device
        self._calls = 0
        self._has_groups = self._is_leaving = False
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = CALL_SECONDS
    ) -> list[Any]:
        """Call ``function(rank, size, *args)`` on every rank.

        Args:
            function: a module-level function.
            args: picklable.
            timeout: seconds after which ranks that have not answered count as hung; ``None``
                waits for as long as no rank has failed.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: when any rank raised or hung.
        """
        if self._is_leaving:
            self._is_leaving = False
            with suppress(RankError):  # ranks that cannot leave the last test's groups are replaced
                self._answers("leaving process groups", timeout)
        if not self._processes:
            self._start()
            self._answers("starting the ranks", _START_SECONDS)  # imports are not the test's time
        self._send(function, args)
        return self._answers(function.__name__, timeout)

    def _send(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._calls += 1
        for pipe in self._pipes:
            with suppress(ConnectionError):  # a rank that has ended meanwhile is told of as such
                pipe.send(_Call(inspect.getfile(function), function.__qualname__, args))

    def _answers(self, what: str, timeout: float | None) -> list[Any]:
        begin = time.monotonic()
        try:
            answers = self._collect(timeout)
        except BaseException:  # a test's time limit: what ranks still answer is not the next call's
            self.close()
            raise
        failed = {rank: answer.error for rank, answer in answers.items() if answer.error}
        hung = sorted(set(range(self.size)) - set(answers))
        if failed or hung:
            stacks = {rank: self._stacks(rank) for rank in hung}
            self.close()
            parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failed.items())]
            if hung:
                waited = time.monotonic() - begin
                parts.append(f"--- ranks {hung} did not answer within {waited:.0f} s ---")
            parts += [f"--- rank {rank} stood here ---\n{text}" for rank, text in stacks.items()]
            raise RankError("\n".join([f"{what} failed", *parts]))
        self._has_groups = any(answer.groups != 1 for answer in answers.values())
        return [answers[rank].value for rank in range(self.size)]

    def _stacks(self, rank: int) -> str:
        """Of the threads of a rank that hangs; empty if it does not tell."""
        process, folder = self._processes[rank], self._folder
        if folder is None or process.pid is None or not process.is_alive():
            return ""
        path = _stacks_of(Path(folder.name), rank)
        if not path.exists():  # it has not begun yet, and the signal would end it
            return ""
        os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # it is written line by line
        return path.read_text()[-_STACKS_CHARACTERS:]

    def _end_of(self, rank: int) -> str:
        """That a rank ended without an answer, by which signal, and where it stood."""
        process = self._processes[rank]
        process.join(_ANSWER_SECONDS)
        code = process.exitcode
        by = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        assert self._folder is not None
        path = _stacks_of(Path(self._folder.name), rank)
        stacks = path.read_text() if path.exists() else ""  # it may have ended before it began
        begin = max(stacks.find("Current thread"), 0)  # a native thread that crashed has none
        told = stacks[begin : begin + _STACKS_CHARACTERS]
        return f"the process ended without an answer{by}\n{told}".rstrip()

    def rest(self) -> None:
        """Mark the end of a test: ranks destroy the process groups that it made.

        Each group of gloo's has threads that wake up a hundred times a second, so hundreds of them
        would take more time than tests. Caches of test functions must not keep such groups.
        Ranks of a fork server that have run very many functions are replaced.
        """
        if self._calls >= _CALLS_OF_A_RANK and self._start_method == "forkserver":
            self.close()
        elif self._has_groups:
            self._has_groups, self._is_leaving = False, True
            self._send(_leave_groups, (self._calls,))

    def close(self) -> None:
        """End the processes; a later :meth:`run` starts new ones."""
        self._calls = 0
        self._has_groups = self._is_leaving = False
        for pipe in self._pipes:
            pipe.close()
        # Ranks whose coverage is measured write it when they end by themselves.
        seconds = 20.0 if "COVERAGE_PROCESS_CONFIG" in os.environ else 0.0
        for process in self._processes:
            process.join(seconds)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._store = None

    def _start(self) -> None:
        import torch.distributed as dist

        context = multiprocessing.get_context(self._start_method)
        if self._start_method == "forkserver":
            start_fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="polyshard-world-")
        # As under torchrun: waiting ranks would read a file over and over.
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        with _one_thread():
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=_serve,
                    args=(
                        _Rank(
                            rank,
                            self.size,
                            self._store.port,
                            self._folder.name,
                            self._seconds,
                            self._device,
                        ),
                        dict(os.environ),
                        theirs,
                    ),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _collect(self, timeout: float | None) -> dict[int, _Answer]:
        answers: dict[int, _Answer] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        open_pipes = dict(zip(self._pipes, range(self.size), strict=True))
        while open_pipes:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for pipe in wait(list(open_pipes), left):
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = _Answer(error=self._end_of(rank))
                except Exception as error:  # of a class that only the rank can import, say
                    answers[rank] = _Answer(error=f"its answer cannot be read here: {error!r}")
                if answers[rank].error:
                    # Peers in a collective with it give up after as long; others may be stuck.
                    last = time.monotonic() + self._seconds + _ANSWER_SECONDS
                    deadline = last if deadline is None else min(deadline, last)
        return answers


def start_fork_server() -> None:
    """Start the process from which ranks are forked, which imports torch; once in this process.

    Python has one for all that fork this way. The first to start it decides what it imports, so
    tests start it before anything that they try does.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with _one_thread():
        forkserver.ensure_running()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Ranks share the cores of one machine."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _serve(given: _Rank, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.clear()  # that of a fork server is of when it started
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from polyshard._torch.gloo import gloo_groups
    from polyshard_resilience import enable
    from polyshard_testing.functional import make_results_in_python

    make_results_in_python()
    rank, size = given.rank, given.size
    stacks = _stacks_of(Path(given.folder), rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    if sys.platform == "linux":  # a crash of a native thread has no Python frames: on stderr
        torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, given.port, size, is_master=False)
    store.set(f"started/{rank}", "")  # the time-out of collectives is not one for ranks to start
    store.wait([f"started/{each}" for each in range(size)])
    dist.init_process_group(
        _backend_for(given),
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=given.seconds),
    )
    enable()  # a test in which one rank fails should not wait for a time-out
    if late_rank.is_late(rank):
        late_rank.become_late()
    pipe.send(_Answer())
    modules: dict[str, ModuleType] = {}
    gc.freeze()  # what was imported is not searched each time
    while True:
        try:
            call: _Call = pipe.recv()
        except (EOFError, ConnectionError):  # the latter where the last answer was not read
            return
        try:
            # under its name there may be what a decorator made of it
            function = inspect.unwrap(getattr(_load(call.path, modules), call.name))
            torch.manual_seed(0)
            _forget_the_last_call()
            pipe.send(_Answer(function(rank, size, *call.args), groups=len(gloo_groups())))
        except BaseException:
            pipe.send(_Answer(error=traceback.format_exc()))


def _leave_groups(rank: int, size: int, number: int) -> None:
    """Destroy all process groups but the default one; the next have names with ``number``."""
    import torch.distributed as dist

    from polyshard._torch.gloo import gloo_groups
    from polyshard._torch.newer import forget_shardings, name_groups_apart

    for group in gloo_groups().values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    name_groups_apart(number)
    forget_shardings()
    gc.collect()  # the last call's models and meshes hold groups in cycles
    gc.freeze()  # what has been imported meanwhile is not searched again


def _backend_for(given: _Rank) -> str:
    """What the ranks communicate over, once their device is the default."""
    import torch
    import torch.distributed as dist

    if given.device == "cpu":
        return "gloo"
    if given.device == "sim":
        importlib.import_module("polyshard_sim").enable()
    torch.accelerator.set_device_index(given.rank % torch.accelerator.device_count())
    torch.set_default_device(given.device)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _by_way_of_the_host)
    if given.device != "sim":  # whose kernels are the CPU's
        from polyshard_testing.host_random import HostRandom

        HostRandom().__enter__()  # type: ignore[no-untyped-call]  # as long as the process
    return f"cpu:gloo,{given.device}:{dist.get_default_backend_for_device(given.device)}"


def _by_way_of_the_host(tensor: Tensor) -> Any:
    """Answers with tensors: the test's process has no device."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor.detach().cpu())


def _forget_the_last_call() -> None:
    """Its failures ended with it, and so did its process groups, which may be out of step."""
    import torch

    from polyshard.agreement.meeting import start_again
    from polyshard.failures import failure_handler

    start_again()  # what this rank reported then is no news now
    handler = failure_handler()
    with handler.reset(None, is_in_mid_step=False):
        pass
    if torch.get_default_device().type != "cpu":  # a failure has aborted the groups of steps
        handler.renew()


def _stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _load(path: str, modules: dict[str, ModuleType]) -> ModuleType:
    if path not in modules:
        name = f"_polyshard_world_{len(modules)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if not Path(path).with_name("__init__.py").exists():
            sys.path.insert(0, str(Path(path).parent))  # helpers beside the test file
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]
