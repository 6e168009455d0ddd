"""Saving among the ranks that are left when others have died.

[Note: survivors]
Process groups break with any rank, and the store with the one that kept it. What ranks share for
sure is the folder they save to. So they talk by files: a folder of their own in it, which only the
owner may enter and whose owner is checked, with one file for everything a rank says. Each waits for
those of the others, and looks now and then whether one of them has died as well.

``torch.distributed.checkpoint`` needs a process group to plan a save; here its planner and its
writer are called without one, on what each rank has said. So the files are those of any checkpoint.

[Note: a folder of an earlier job]
A job that was killed while its survivors saved leaves their folder, and the next job may have the
same address and ranks. The leading rank removes it, but another may come before. So each of the
others leaves a word beside the folder that it has just drawn, and enters a folder that repeats it:
the leading rank does so in the one that it has made, until all have entered.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import pickle
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from typing_extensions import override

from polyshard._torch.private import default_store, store_timeout_seconds
from polyshard._torch.staged import plan_for_all
from polyshard.errors import CheckpointError
from polyshard.files import replace_file
from polyshard_checkpoint.together import Ranks
from polyshard_resilience.alarm.peers import Roll

T = TypeVar("T")
PRIVATE = 0o700
PAUSE_SECONDS = 0.02
LOOK_SECONDS = 0.5
FOLDER_SECONDS = 300.0
FAREWELL_SECONDS = 10.0
NAMED = 5
"""How many of the tensors that lack something an error names."""


class Survivors(Ranks):
    """Some ranks of the job, which need nothing but a folder. See [Note: survivors]."""

    def __init__(self, folder: Path, members: tuple[int, ...], name: str) -> None:
        """Every one of ``members`` makes one, of the same ``name``; see :meth:`of`."""
        self._members = members
        self._place = folder / f".survivors-{name}"
        self._number = 0
        self._seconds = _patience()

    @classmethod
    def of(cls, folder: Path, ranks: Sequence[int] | None) -> Survivors:
        """Those of all ranks that are left.

        Raises:
            CheckpointError: when this rank is none of them, or there is no process group.
        """
        if not dist.is_initialized():
            raise CheckpointError("save_survivors needs the process group that has lost ranks")
        every = range(dist.get_world_size())
        members = tuple(sorted(ranks)) if ranks is not None else _left_of(every)
        if dist.get_rank() not in members or not set(members) <= set(every):
            raise CheckpointError(
                f"ranks={list(members)}: they must be some of {len(every)}, and rank "
                f"{dist.get_rank()}, which calls this, one of them"
            )
        job = [os.environ.get(n, "") for n in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        _calls()[members] += 1  # folders of earlier calls may be there a moment longer
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        said = repr((job, again, members, _calls()[members]))
        return cls(folder, members, hashlib.sha256(said.encode()).hexdigest()[:16])

    @property
    @override
    def members(self) -> Sequence[int]:
        return self._members

    def compare(self, what: str, value: object) -> None:
        """Refuse to continue unless ``value`` is the same on all.

        Raises:
            CheckpointError: on every rank alike.
        """
        found = dict(zip(self._members, self.gathered(value), strict=True))
        if len(set(found.values())) > 1:
            each = ", ".join(f"rank {rank}: {one}" for rank, one in found.items())
            raise CheckpointError(
                f"ranks that are left differ in the {what} ({each}), so their shards do not belong "
                "together. A step within polyshard_resilience.attempt() is made by all of them "
                "or by none"
            )

    # Talking ----------------------------------------------------------------------------------

    @override
    def __enter__(self) -> Survivors:
        seconds = min(self._seconds, FOLDER_SECONDS)
        if self.leads:
            self._begin()
            try:
                self._check_private()
                self._wait(self._all_have_entered, seconds)
            except BaseException:
                self.close()
                raise
            return self
        word, beside = secrets.token_bytes(8), self._beside(self.rank)
        try:
            with _said_as_error(beside):
                beside.parent.mkdir(parents=True, exist_ok=True)
                replace_file(beside, word)
            self._wait(lambda: _content(self._file("greets", self.rank)) == word, seconds)
        finally:
            beside.unlink(missing_ok=True)
        self._check_private()
        replace_file(self._file("entered", self.rank), b"")
        return self

    def _all_have_entered(self) -> bool:
        """On the leading rank; see [Note: a folder of an earlier job]."""
        others = self._members[1:]
        for rank in others:
            word, greeting = _content(self._beside(rank)), self._file("greets", rank)
            if word is not None and word != _content(greeting):
                replace_file(greeting, word)
        return all(self._file("entered", rank).exists() for rank in others)

    def _beside(self, rank: int) -> Path:
        return self._place.with_name(f"{self._place.name}-{rank}")

    def _check_private(self) -> None:
        found = os.lstat(self._place)
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not private or found.st_uid != os.geteuid():
            raise CheckpointError(
                f"'{self._place}' is not a folder that this user alone can write to. Remove it"
            )

    def _begin(self) -> None:
        with _said_as_error(self._place):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._place, ignore_errors=True)  # of one that was killed itself
            self._place.mkdir(PRIVATE)

    @override
    def gathered(self, value: T) -> list[T]:
        self._number += 1
        replace_file(self._file("says", self.rank), pickle.dumps(value))
        paths = [self._file("says", rank) for rank in self._members]
        self._await(paths)
        return [pickle.loads(path.read_bytes()) for path in paths]  # of our own ranks alone

    @override
    def close(self) -> None:
        """Remove the folder, which no rank reads any more."""
        self._number = 0
        with suppress(OSError):
            replace_file(self._file("left", self.rank), b"")
            if self.leads:
                with suppress(CheckpointError):
                    paths = [self._file("left", rank) for rank in self._members]
                    self._await(paths, FAREWELL_SECONDS)
                shutil.rmtree(self._place, ignore_errors=True)

    def _file(self, kind: str, rank: int) -> Path:
        return self._place / f"{kind}-{self._number}-{rank}"

    def _await(self, paths: Sequence[Path], seconds: float | None = None) -> None:
        seconds = self._seconds if seconds is None else seconds
        self._wait(lambda: all(path.exists() for path in paths), seconds)

    def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        begin = looked = time.monotonic()
        roll = Roll(self._members)
        while not is_over():
            time.sleep(PAUSE_SECONDS)
            now = time.monotonic()
            if now - looked < LOOK_SECONDS:
                continue
            looked = now
            absent = roll.call()
            if absent is not None or now - begin > seconds:
                said = absent.said.values() if absent else [f"not all came within {seconds:.0f} s"]
                who = "; ".join(said)
                raise CheckpointError(
                    f"ranks {list(self._members)} were to save their state, but {who}. Call "
                    "save_survivors again, on the remaining ranks"
                )

    # Writing ----------------------------------------------------------------------------------

    @override
    def write(
        self, doing: str, writer: StorageWriter, entries: dict[str, Any], *, partial: bool = False
    ) -> tuple[str, ...]:
        planner = DefaultSavePlanner()
        plan = self.agreed(doing, lambda: self._plan(planner, writer, entries))
        plans = self.gathered(plan)
        missing = tuple(missing_of(plans))
        if missing and not partial:
            raise CheckpointError(self._incomplete(missing))
        every, metadata = plan_for_all(plans)
        mine = writer.prepare_global_plan(every)[self.part[0]]
        results = self.gathered(self.agreed(doing, lambda: _written(planner, writer, mine)))
        self.led(doing, lambda: writer.finish(metadata, results))
        return missing

    def _incomplete(self, missing: Sequence[str]) -> str:
        died = sorted(set(range(self.size)) - set(self._members))
        more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return (
            f"ranks {died} held shards that no other rank has: {'; '.join(missing[:NAMED])}{more}. "
            "Load the last checkpoint; partial=True saves the rest, which is none"
        )

    def _plan(
        self, planner: DefaultSavePlanner, writer: StorageWriter, entries: dict[str, Any]
    ) -> SavePlan:
        writer.reset()
        writer.set_up_storage_writer(self.leads)
        planner.set_up_planner(entries, writer.storage_meta(), self.leads)
        return writer.prepare_local_plan(planner.create_local_plan())


def _content(path: Path) -> bytes | None:
    with suppress(OSError):  # it is not there yet, or not any more
        return path.read_bytes()
    return None


@contextmanager
def _said_as_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be made: {error}") from error


def _written(planner: DefaultSavePlanner, writer: StorageWriter, plan: SavePlan) -> Any:
    writing = writer.write_data(planner.finish_plan(plan), planner)
    writing.wait()
    return writing.value()


@functools.cache
def _calls() -> Counter[tuple[int, ...]]:
    """How often this process was among some ranks that were left: as often as they were."""
    return Counter()


def _left_of(ranks: Sequence[int]) -> tuple[int, ...]:
    absent = Roll(ranks).call()
    return tuple(rank for rank in ranks if absent is None or rank not in absent.said)


def _patience() -> float:
    store = default_store()
    return 300.0 if store is None else store_timeout_seconds(store)


# What is missing ----------------------------------------------------------------------------------


def missing_of(plans: Iterable[SavePlan]) -> Iterator[str]:
    """What ``plans`` lack of the tensors they write parts of, one sentence a tensor."""
    sizes: dict[str, Sequence[int]] = {}
    parts: dict[str, set[tuple[Sequence[int], Sequence[int]]]] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                chunk: ChunkStorageMetadata = item.tensor_data.chunk
                sizes[item.index.fqn] = tuple(item.tensor_data.size)
                part = (tuple(chunk.offsets), tuple(chunk.sizes))
                parts.setdefault(item.index.fqn, set()).add(part)
    for name, size in sizes.items():
        found = sum(math.prod(lengths) for _, lengths in parts[name])
        if found < math.prod(size):
            yield f"{name} {list(size)} lacks {_gaps(size, parts[name])}"


def _gaps(size: Sequence[int], parts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Rows, where one dim is cut; else a number of elements."""
    held = [part for part in parts if math.prod(part[1])]
    cut = [d for d in range(len(size)) if any(lengths[d] != size[d] for _, lengths in held)]
    if not held or len(cut) != 1:
        left = math.prod(size) - sum(math.prod(lengths) for _, lengths in held)
        return f"{left:,} of {math.prod(size):,} elements" if held else "everything"
    (dim,) = cut
    ranges = _blanks(size[dim], {offsets[dim]: lengths[dim] for offsets, lengths in held})
    rows = ", ".join(f"{start}:{stop}" for start, stop in ranges)
    return f"[{rows}] of dim {dim}"


def _blanks(length: int, filled: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    start = 0
    for begin, count in sorted(filled.items()):
        if begin > start:
            yield start, begin
        start = max(start, begin + count)
    if start < length:
        yield start, length
