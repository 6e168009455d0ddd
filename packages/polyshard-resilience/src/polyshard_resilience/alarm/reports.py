"""What ended the work of all ranks, as they tell it each other."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import Enum

NOBODY = -1
"""The rank of a report that blames none."""


class Cause(Enum):
    """Why no rank can continue."""

    RAISED = "raised"
    """A rank met an exception; its process lives."""
    STOPPED = "stopped"
    """A rank's process was stopped (SIGSTOP), and may be continued."""
    GONE = "gone"
    """A rank's process ended, or cannot be reached any more."""
    APART = "apart"
    """Ranks wait for each other at different places."""
    VERDICT = "verdict"
    """Gradients of different parameters: each rank finds it, unless another has told it before."""


REMEDIES = {
    Cause.RAISED: "Fix that, then call reset_iter_state() on every rank.",
    Cause.STOPPED: "Continue the process (kill -CONT), then call reset_iter_state() on every rank.",
    Cause.GONE: (
        "It cannot rejoin these ranks: save the remaining state if you need it, and restart the "
        "job from its last checkpoint, which torchrun does by itself (--max-restarts)."
    ),
    Cause.APART: (
        "Every rank must call the same modules, in the same order and equally often, and "
        "call backward on the same ones. Then call reset_iter_state() on every rank."
    ),
    Cause.VERDICT: "Then call reset_iter_state() on every rank.",
}


@dataclass(frozen=True)
class Report:
    """One failure of ``rank``, in words; :data:`NOBODY` where it is of no single rank."""

    rank: int
    cause: Cause
    text: str
    """What follows "because"."""
    quotes_within: float = 0.0
    """Seconds that others wait for the rank to add the exception, which has to leave autograd."""

    @property
    def said(self) -> str:
        """The end of a sentence; a quoted exception may have its full stop already."""
        return f"{self.text.removesuffix('.')}."

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.cause]

    @property
    def is_of_process(self) -> bool:
        """Whether its rank cannot answer: the process ended, or was stopped."""
        return self.cause in (Cause.GONE, Cause.STOPPED)

    def encode(self) -> str:
        """As text for other ranks."""
        return json.dumps([self.rank, self.cause.value, self.text, self.quotes_within])

    @classmethod
    def decode(cls, text: str) -> Report:
        """From what :meth:`encode` returned."""
        rank, cause, words, quotes_within = json.loads(text)
        return cls(rank, Cause(cause), words, quotes_within)

    def with_detail(self, detail: str) -> Report:
        """The same, with the exception quoted."""
        return replace(self, text=f"{self.text}: {detail}", quotes_within=0.0)


def unexplained(peer: int | None, error: Exception, *, is_there: bool) -> Report:
    """Of a transfer with ``peer`` that ended with ``error``, when no rank has said why.

    ``is_there``: whether the process of ``peer`` is known to run.
    """
    whom = "a rank" if peer is None else f"rank {peer}"
    rank = NOBODY if peer is None else peer
    if re.search("timed? ?out", str(error), re.IGNORECASE):
        return Report(rank, Cause.RAISED, f"{whom} did not answer in time: {error}")
    cause = Cause.RAISED if is_there else Cause.GONE
    return Report(rank, cause, f"the connection to {whom} broke: {error}")
