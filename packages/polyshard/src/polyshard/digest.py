"""All ranks compare their plans before the first collective, so that a difference is an error.

[Note: digest]
Each rank publishes a hash of its plan lines in the process group's store and waits for those of
the others, so nothing here is a collective that could hang half way: a rank that never comes is
named after the store's time-out, a rank that failed while planning is quoted, and ranks that differ
exchange their full lines and show where. The keys carry the mesh's ranks and a count, so that
several models, on different sets of ranks, do not meet. A rank that gives a meeting up takes its
news back: the next attempt has the same count, and must not be compared with this one.
"""

from __future__ import annotations

import difflib
import hashlib
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from polyshard.__about__ import __version__
from polyshard._torch_private import default_store, store_timeout_seconds
from polyshard.errors import PlanMismatchError

if TYPE_CHECKING:
    from polyshard.schedule import Unit

POLL_SECONDS = 0.01
GRACE_SECONDS = 2.0
"""How long a rank that reported a failure may still turn up (its caller may have recovered)."""
SHOWN_LINES = 20


@dataclass(frozen=True)
class Board:
    """The part of the store in which one set of ranks meets once."""

    store: dist.Store
    prefix: str
    rank: int
    ranks: tuple[int, ...]

    def key(self, kind: str, rank: int) -> str:
        """Where ``rank`` leaves its ``kind`` of news."""
        return f"{self.prefix}/{kind}/{rank}"

    def post(self, kind: str, text: str) -> None:
        """Publish for the others."""
        self.store.set(self.key(kind, self.rank), text)

    def read(self, kind: str, rank: int) -> str | None:
        """What ``rank`` published and did not take back, or ``None``; never waits."""
        key = self.key(kind, rank)
        if not self.store.check([key]):
            return None
        return self.store.get(key).decode() or None

    def collect(self, kind: str) -> dict[int, str]:
        """Everybody's news; waits.

        Raises:
            PlanMismatchError: when a rank failed meanwhile or does not come within the time-out.
        """
        deadline = time.monotonic() + store_timeout_seconds(self.store)
        found: dict[int, str] = {}
        failed_since: float | None = None
        while True:
            for rank in self.ranks:
                if rank not in found and (text := self.read(kind, rank)) is not None:
                    found[rank] = text
            missing = [r for r in self.ranks if r not in found]
            if not missing:
                return found
            failures = self._failures(missing)
            now = time.monotonic()
            failed_since = (failed_since or now) if failures else None
            if failed_since is not None and now - failed_since > GRACE_SECONDS:
                raise PlanMismatchError("; ".join(failures))
            if now > deadline:
                raise PlanMismatchError(self._absent(missing))
            time.sleep(POLL_SECONDS)

    def _failures(self, missing: Sequence[int]) -> list[str]:
        texts = ((rank, self.read("failure", rank)) for rank in missing)
        return [f"rank {rank} failed while planning: {text}" for rank, text in texts if text]

    def _absent(self, missing: Sequence[int]) -> str:
        seconds = store_timeout_seconds(self.store)
        return (
            f"ranks {list(missing)} of {list(self.ranks)} did not reach the first forward of their "
            f"sharded model within {seconds:.0f} s (rank {self.rank} did). Every rank of the mesh "
            "must shard the same model and call it; check that all were started."
        )


def open_board(ranks: Sequence[int]) -> Board | None:
    """The next meeting of ``ranks``; ``None`` without a store shared by real processes."""
    board = _board(ranks)
    if board is None:
        return None
    count = board.store.add(board.key("count", board.rank), 0)
    return replace(board, prefix=f"{board.prefix}/{count}")


def open_step_board(ranks: Sequence[int]) -> Board | None:
    """Where ``ranks`` report failures during steps; ``None`` as in :func:`open_board`."""
    board = _board(ranks)
    return replace(board, prefix=f"{board.prefix}/steps") if board is not None else None


def _board(ranks: Sequence[int]) -> Board | None:
    store = default_store()
    if store is None or dist.get_backend() == "fake":
        return None
    prefix = f"polyshard/{zlib.crc32(repr(tuple(ranks)).encode()):08x}"
    return Board(store, prefix, dist.get_rank(), tuple(ranks))


def _close(board: Board) -> None:
    """Count the meeting, so that the next one has new keys."""
    board.store.add(f"{board.prefix.rsplit('/', 1)[0]}/count/{board.rank}", 1)


def report_failure(ranks: Sequence[int], error: BaseException) -> None:
    """Tell the other ranks why this one will not come to compare plans."""
    board = open_board(ranks)
    if board is not None and len(ranks) > 1:
        # Notes say which plugin and hook an exception came from.
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        board.post("failure", f"{type(error).__name__}: {error}{notes}")


def plan_lines(root: Unit) -> list[str]:
    """Everything that must be equal on all ranks."""
    lines = [
        f"polyshard {__version__}, torch {torch.__version__}",
    ]
    for unit in root.context.units:
        for group in unit.groups:
            lines.extend(group.plan().lines())
    return lines


def compare_plans(root: Unit) -> None:
    """See [Note: digest].

    Raises:
        PlanMismatchError: on every rank of the root's mesh.
    """
    ranks = root.roles.ranks
    board = open_board(ranks)
    if board is None or len(ranks) == 1:
        return
    compare_lines(board, plan_lines(root))


def compare_lines(board: Board, lines: Sequence[str]) -> None:
    """Raise on every rank unless all ranks bring the same ``lines``."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = _exchange(board, "digest", digest)
    if len(set(digests.values())) == 1:
        _close(board)
        return
    texts = _exchange(board, "lines", "\n".join(lines))
    _close(board)
    raise PlanMismatchError(_difference(texts))


def _exchange(board: Board, kind: str, text: str) -> dict[int, str]:
    board.post(kind, text)
    try:
        return board.collect(kind)
    except PlanMismatchError:
        for posted in ("digest", "lines"):
            board.post(posted, "")
        raise


def _difference(texts: dict[int, str]) -> str:
    first, *others = sorted(texts)
    by_text: dict[str, list[int]] = {}
    for rank in others:
        if texts[rank] != texts[first]:
            by_text.setdefault(texts[rank], []).append(rank)
    report = ["ranks planned different things; nothing was communicated yet."]
    for text, ranks in by_text.items():
        diff = difflib.unified_diff(texts[first].splitlines(), text.splitlines(), lineterm="", n=0)
        changed = [d for d in diff if d[:1] in "+-" and d[:3] not in ("+++", "---")]
        report.append(f"rank {first} (-) against ranks {ranks} (+):")
        report.extend(changed[:SHOWN_LINES])
        if len(changed) > SHOWN_LINES:
            report.append(f"... and {len(changed) - SHOWN_LINES} more lines")
    report.append("Pass the same model, mesh, policies and plugins on every rank.")
    return "\n".join(report)
