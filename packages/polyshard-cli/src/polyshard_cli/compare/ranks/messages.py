"""What the ranks of an engine and the process that leads them say to each other."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from polyshard.errors import PeerError
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.errors import JobError
from polyshard_cli.compare.settings import Settings

__all__ = ["Failure", "Start", "first_of", "one_line"]

LONGEST = 300
"""Characters of a failure in a table."""
PEER_SIGNS = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


@dataclass(frozen=True)
class Start:
    """What a rank is given."""

    settings: Settings
    spec: Spec
    rank: int
    ranks: int
    threads: int
    folder: str
    """Of the engine's own; holds the store, and what ranks print."""


@dataclass(frozen=True)
class Failure:
    """Why an engine cannot continue.

    Attributes:
        rank: whose failure it is.
        message: one line.
        details: a traceback, or what the rank last printed.
        is_of_job: whether it is the job's fault, and no engine's.
        is_echo: whether it only says that another rank has failed.
    """

    rank: int
    message: str
    details: str = ""
    is_of_job: bool = False
    is_echo: bool = False

    @staticmethod
    def of(rank: int, error: BaseException) -> Failure:
        """What ``error`` says."""
        text = str(error)
        is_job = isinstance(error, JobError)
        is_echo = isinstance(error, PeerError) or any(sign in text for sign in PEER_SIGNS)
        message = text if is_job else one_line(f"{type(error).__name__}: {text}")
        return Failure(rank, message, traceback.format_exc(), is_job, is_echo)


def first_of(failures: list[Failure]) -> Failure:
    """The cause: the first that does not merely tell of another rank's."""
    causes = [failure for failure in failures if not failure.is_echo]
    return (causes or failures)[0]


def one_line(text: str) -> str:
    """The first line that says something, cut where a table has no room."""
    joined = " ".join(text.split())
    return joined if len(joined) <= LONGEST else f"{joined[: LONGEST - 3]}..."
