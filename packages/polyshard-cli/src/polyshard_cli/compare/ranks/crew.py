"""The ranks of one engine, as the process that leads them sees them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.ranks.messages import Failure, Start, first_of
from polyshard_cli.compare.ranks.serving import output_of, serve
from polyshard_cli.compare.settings import Settings
from polyshard_cli.compare.training.warming import MODULES

__all__ = ["Crew", "EngineError"]

GRACE_SECONDS = 3.0
"""For other ranks to tell what they know, once one has failed."""
START_SECONDS = 120.0
"""For processes to import torch and find each other, on a busy machine, at least."""
LAST_CHARACTERS = 2000
PRELOADED = [*MODULES, "polyshard_cli.compare.training.session"]


class EngineError(Exception):
    """An engine cannot continue; its ranks have been ended."""

    def __init__(self, failure: Failure) -> None:
        """Of the rank that failed first."""
        super().__init__(failure.message)
        self.failure = failure


class Crew:
    """Processes with pipes. They are ended with :meth:`close`, and by the first failure."""

    def __init__(self, settings: Settings, spec: Spec) -> None:
        """Start them. After :meth:`meet`, :meth:`answers` tells what they have built."""
        self.spec = spec
        self.size = 1 if spec.kind == "single" else settings.ranks
        self._timeout = settings.timeout
        self._folder = tempfile.TemporaryDirectory(prefix="polyshard-compare-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        # One import of torch serves all ranks of all engines.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        threads = threads_of_rank(settings.ranks)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            start = Start(settings, spec, rank, self.size, threads, self._folder.name)
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            process = context.Process(target=serve, args=(start, environment, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def ask(self, *command: object) -> list[Any]:
        """Have every rank do something; their answers, in order.

        Raises:
            EngineError: when one fails, ends, or does not answer in time.
        """
        for pipe in self._pipes:
            try:
                pipe.send(command)
            except OSError:
                continue  # it has ended; why is found out where its answer is missing
        return self.answers()

    def meet(self) -> None:
        """Wait until every rank is there.

        Raises:
            EngineError: as for :meth:`ask`.
        """
        self.answers(max(self._timeout, START_SECONDS))

    def answers(self, timeout: float | None = None) -> list[Any]:
        """What every rank says next, within ``timeout`` seconds or those of the settings.

        Raises:
            EngineError: as for :meth:`ask`.
        """
        seconds = self._timeout if timeout is None else timeout
        found: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + seconds
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answer = self._answer(pipe, rank)
                if isinstance(answer, Failure):
                    failures.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                found[rank] = answer
        if not failures and waiting:
            silent = ", ".join(str(rank) for rank in sorted(waiting.values()))
            message = f"rank {silent} did not answer within {seconds:g} s (--timeout)"
            failures.append(Failure(min(waiting.values()), message))
        if failures:
            self.close()
            raise EngineError(first_of(failures))
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks, and forget what they have printed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def _answer(self, pipe: Connection, rank: int) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return Failure(rank, self._end_of(rank), self._last_words(rank))

    def _end_of(self, rank: int) -> str:
        """How a process ended that said nothing."""
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            maybe = ": out of memory, perhaps" if name == "SIGKILL" else ""
            return f"it was killed by {name}{maybe}"
        words = self._last_words(rank).splitlines()
        said = f"; it last printed: {words[-1]}" if words else ""
        return f"it ended with exit code {code} and without an error{said}"

    def _last_words(self, rank: int) -> str:
        path = output_of(self._folder.name, rank)
        return path.read_text("utf-8", "replace")[-LAST_CHARACTERS:] if path.exists() else ""


def threads_of_rank(ranks: int) -> int:
    """Compute threads of a process: as the environment says, or an even share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max(1, (os.cpu_count() or 1) // ranks)
