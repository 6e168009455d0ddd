"""A thread that waits for gloo in place of the main one, which can then be called away.

[Note: stranded messages]
When gloo closes a connection it tells the messages that wait for their turn, and forgets those that
are half way through it: of which the header was read and the rest was not, or that fill a socket
which nobody reads. Whoever waits for such a message waits until the time-out, and Python cannot
end that. So the main thread never waits for a message itself. A thread does, and when connections
are cut it is left behind with what it waits for: it keeps the memory alive that the message was to
be written to or read from, and ends with the time-out. The next wait gets a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread

import torch.distributed as dist

LOOK_SECONDS = 0.05
"""How often the main thread looks whether connections were cut."""


def _locked() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass
class Job:
    """Works to wait for, one after the other, until one fails."""

    works: Sequence[dist.Work]
    keep: object
    """What must live until they are done."""
    at: int = 0
    """Of the work that is waited for."""
    error: RuntimeError | None = None
    is_left: bool = False
    """Whether nobody waits for it any more."""
    done: Lock = field(default_factory=_locked)
    """Held until all is done."""

    def run(self) -> None:
        """In the thread that waits."""
        try:
            for self.at, work in enumerate(self.works):  # noqa: B020
                work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            self.done.release()


class Waiter:
    """See [Note: stranded messages]."""

    def __init__(self) -> None:
        """There is no thread yet."""
        self._jobs: SimpleQueue[Job | None] | None = None

    def wait(self, job: Job, is_cut: Callable[[], bool]) -> bool:
        """Return when ``job`` is done; ``False`` if it was left behind, because of a cut."""
        jobs = self._jobs
        if jobs is None:
            jobs = self._jobs = SimpleQueue()
            Thread(target=_work, args=(jobs,), name="polyshard-wait", daemon=True).start()
            weakref.finalize(self, jobs.put, None).atexit = False
        jobs.put(job)
        was_cut = False
        while not job.done.acquire(timeout=LOOK_SECONDS):
            if was_cut:
                job.is_left, self._jobs = True, None
                return False
            was_cut = is_cut()
        return True


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """Until a job is left behind, or nobody is there to bring one."""
    while (job := jobs.get()) is not None:
        job.run()
        if job.is_left:
            return
        del job  # what it keeps alive is not needed while the next one is waited for
