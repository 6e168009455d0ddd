"""Saving and resuming a run. See [Note: whole or not at all] and [Note: stall of a save].

[Note: stall of a save]
What training waits for is one copy of this rank's shards. The memory is kept for the next save:
fresh pages cost more than the copy. With an accelerator it is pinned and the copies are queued on
the current stream, so nothing waits here; the optimizer's next step comes after them on the stream,
and the thread that reads the copies waits for the event.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.staged import with_local
from polyshard.engine.root import units_below
from polyshard.engine.trees import tensors
from polyshard.errors import CheckpointError, SettingError, warn
from polyshard_checkpoint.folder import Folder
from polyshard_checkpoint.manifest import FileSum, Manifest
from polyshard_checkpoint.packing import Entries
from polyshard_checkpoint.reading import CheckpointPlanner, CheckpointReader, files_in
from polyshard_checkpoint.state import TrainingState
from polyshard_checkpoint.survivors import Survivors
from polyshard_checkpoint.together import LostRanksError, Ranks, attempt
from polyshard_checkpoint.writing import Progress, SummedWriter
from polyshard_resilience._torch_private import cut_groups

_Path = tuple[object, ...]


class Staging:
    """Host memory for one save at a time. See [Note: stall of a save]."""

    def __init__(self) -> None:
        """Nothing is allocated before the first copy."""
        self._buffers: dict[_Path, Tensor] = {}
        self._used: set[_Path] = set()

    @torch.no_grad()
    def copy(self, tree: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """``tree`` on the host, and what waits until it is there.

        Args:
            tree: nested dicts of tensors and plain values.
        """
        self._used = set()
        copied: dict[str, Any] = self._copied((), tree)
        for path in self._buffers.keys() - self._used:
            del self._buffers[path]
        return copied, _waiter()

    def _copied(self, path: _Path, value: Any) -> Any:
        if isinstance(value, DTensor):
            return with_local(value, self._buffered(path, local_tensor(value)))
        if isinstance(value, Tensor):
            return self._buffered(path, value)
        if isinstance(value, Mapping):
            return {key: self._copied((*path, key), inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied((*path, i), inner) for i, inner in enumerate(value))
        return copy.deepcopy(value)

    def _buffered(self, path: _Path, tensor: Tensor) -> Tensor:
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(
                tensor.shape,
                dtype=tensor.dtype,
                pin_memory=tensor.device.type != "cpu",
                device="cpu",
            )
            self._buffers[path] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def _waiter() -> Callable[[], None]:
    if not torch.accelerator.is_available():
        return lambda: None
    event = torch.Event()
    event.record()
    return event.synchronize


PATIENCE_SECONDS = 10.0
"""How long ranks that are left wait for an asynchronous save to end."""


@dataclass(frozen=True)
class Restored:
    """The checkpoint that a run resumes from.

    Attributes:
        step: the saved step; continue with the next.
        path: the checkpoint's folder.
        notes: a sentence for each checkpoint that was skipped as damaged, and for state that could
            not be restored (of ranks beyond the current number).
    """

    step: int
    path: Path
    notes: tuple[str, ...] = ()


@dataclass
class Saving:
    """A save that runs beside training."""

    _path: Future[Path] = field(repr=False)
    _is_said: bool = field(default=False, init=False, repr=False)
    """Whether it failed, and that was raised."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._path.done()

    def wait(self) -> Path:
        """The checkpoint's folder, once it is complete.

        Raises:
            CheckpointError: on every rank alike, when it failed on any.
        """
        try:
            return self._path.result()
        except CheckpointError:
            self._is_said = True
            raise


class Checkpoints:
    """The checkpoints of one run, in one folder that all ranks see and no other run uses.

    All methods are collective: every rank calls them, in the same order. As a context manager it
    waits at the end for a save that is still under way.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 2,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            folder: made when something is saved.
            keep: how many of the newest intact checkpoints a save leaves; ``None`` for all.
            progress: called on each rank while a save is written, in the thread that writes.

        Raises:
            SettingError: when ``keep`` is not a positive number.
        """
        if keep is not None and keep < 1:
            raise SettingError(f"keep={keep}: at least the newest checkpoint has to stay.")
        self._folder = Folder(Path(folder))
        self._keep = keep
        self._progress = progress
        self._ranks = Ranks()
        self._staging = Staging()
        self._damaged: set[Path] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Saving | None = None

    def save(self, step: int, state: TrainingState) -> Path:
        """Save ``state`` as that of ``step``; returns the checkpoint's folder.

        Raises:
            CheckpointError: on every rank alike, when it failed on any. Older checkpoints stay.
            SettingError: for a ``step`` that is no number of steps.
        """
        _check_step(step)
        self.wait()
        doing = "Collecting the state"
        entries = self._ranks.agreed(doing, lambda: state.save(self._ranks.place))
        return self._write(step, entries)

    def save_async(self, step: int, state: TrainingState) -> Saving:
        """As :meth:`save`, but training waits only for a copy of this rank's shards.

        The copy takes host memory of their size, which later saves reuse. The call first waits for
        a save that is still running.

        Raises:
            CheckpointError: on every rank, if an earlier save failed and its error has not been
                raised. :meth:`Saving.wait` or the next call raises the error of this save.
            SettingError: for a ``step`` that is no number of steps.
        """
        _check_step(step)
        self.wait()
        self._ranks.group  # noqa: B018  # made here: not from a thread, beside the job's transfers
        collected = attempt(lambda: self._staging.copy(state.save(self._ranks.place)))
        self._thread = self._thread or ThreadPoolExecutor(1, "polyshard-checkpoint")

        def write() -> Path:
            # Ranks compare how collecting went only here: training is not to wait for its peers.
            entries, arrived = self._ranks.agreed("Collecting the state", collected.result)
            arrived()
            return self._write(step, entries)

        self._saving = Saving(self._thread.submit(write))
        return self._saving

    def save_survivors(
        self,
        step: int,
        state: TrainingState,
        *,
        ranks: Sequence[int] | None = None,
        partial: bool = False,
    ) -> Path:
        """Save the remaining state after a rank has died; every remaining rank calls this.

        It needs only the folder: no process group, and no store, which may have been on the dead
        rank. If every shard has a replica (HSDP), the checkpoint is complete, like any other.
        Otherwise the error names the missing tensors.

        Args:
            step: that each of these ranks has completed last; they compare it.
            state: as of :meth:`save`. Gathered parameters and gradients on their way are dropped.
            ranks: the remaining ranks; by default all but those known to be dead.
            partial: save an incomplete state too, in a folder ``partial-step-...``
                that :meth:`load` takes for no checkpoint; its manifest says what is missing.

        Raises:
            CheckpointError: on every rank alike, when something is missing, steps differ, or
                saving failed on any.
            SettingError: for a ``step`` that is no number of steps.
        """
        _check_step(step)
        self._abandon()
        with Survivors.of(self._folder.path, ranks) as left:
            left.compare("completed step", step)
            entries = left.agreed(
                "Collecting the state", lambda: _left(state).save(self._ranks.place)
            )
            return self._write(step, entries, left, partial=partial)

    def _abandon(self) -> None:
        """End a save that is still under way, and may wait for the rank that died."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with suppress(Exception):
            try:
                saving._path.result(PATIENCE_SECONDS)
            except TimeoutError:
                cut_groups()  # they are of no use any more
                saving.wait()

    def wait(self) -> None:
        """Wait for a save that is still under way.

        Raises:
            CheckpointError: on every rank alike, when it failed on any; said once, so not if
                the :class:`Saving` itself was waited for.
        """
        saving, self._saving = self._saving, None
        if saving is not None and not saving._is_said:
            saving.wait()

    def load(
        self, state: TrainingState, path: str | os.PathLike[str] | None = None
    ) -> Restored | None:
        """Load the newest intact checkpoint; return ``None`` if the run has none.

        The checksums of all files are verified before anything is loaded; a damaged checkpoint is
        skipped, with a warning.

        Args:
            state: the state to fill, sharded in any way.
            path: load this checkpoint and no other.

        Raises:
            CheckpointError: on every rank, if all checkpoints are damaged, or the loaded one does
                not fit ``state``.
        """
        self.wait()
        notes: list[str] = []
        candidates, unreadable = self._ranks.led("Looking for checkpoints", self._candidates(path))
        for candidate in candidates:
            manifest, damage = self._examined(candidate)
            if manifest is not None and not damage:
                warn(notes := [*unreadable, *notes])
                more = self._load(candidate, manifest, state)
                return Restored(manifest.step, candidate, (*notes, *more))
            self._damaged.add(candidate)
            notes.append(f"{candidate.name} is damaged and was passed over: {'; '.join(damage)}")
        if notes or unreadable:
            raise CheckpointError(
                f"no checkpoint in '{self._folder.path}' is intact: "
                f"{'; '.join([*unreadable, *notes])}. To start anew, choose another folder."
            )
        return None

    def _candidates(
        self, path: str | os.PathLike[str] | None
    ) -> Callable[[], tuple[list[Path], list[str]]]:
        if path is None:
            return self._folder.found
        return lambda: ([Path(path)], [])

    def _examined(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """The manifest of a checkpoint, and what is wrong with it; every rank reads some files."""
        try:
            manifest = self._ranks.led(f"Reading '{path}'", lambda: Manifest.read(path))
        except LostRanksError:
            raise  # the checkpoint itself may be whole
        except CheckpointError as error:
            return None, [str(error)]
        found = self._ranks.gathered(manifest.damage(path, *self._ranks.part))
        return manifest, sorted({one for each in found for one in each})

    def _load(self, path: Path, manifest: Manifest, state: TrainingState) -> tuple[str, ...]:
        ranks, planner = self._ranks, CheckpointPlanner()
        if manifest.missing:
            raise CheckpointError(
                f"'{path}' has the state of some ranks only: {'; '.join(manifest.missing)}. "
                "torch.distributed.checkpoint cannot load it; resume from a complete checkpoint."
            )

        def begin() -> tuple[CheckpointReader, Entries, tuple[str, ...]]:
            reader = CheckpointReader(path)
            metadata = reader.read_metadata()
            if more := {".metadata", *files_in(metadata)} - manifest.files.keys():
                raise CheckpointError(f"it refers to {min(more)}, which has no checksum")
            return reader, *state.room(ranks.place, metadata)

        def transfer() -> None:
            dcp.load(
                entries,
                storage_reader=reader,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.alone,
            )
            state.load(ranks.place, entries)

        doing = f"Loading '{path}'"
        reader, entries, notes = ranks.agreed(doing, begin)
        ranks.agreed(doing, transfer)
        return notes

    def _write(
        self, step: int, entries: Entries, ranks: Ranks | None = None, *, partial: bool = False
    ) -> Path:
        ranks, folder = ranks or self._ranks, self._folder
        doing = f"Saving step {step} in '{folder.path}'"
        unfinished = ranks.led(doing, folder.begin)
        try:
            writer = SummedWriter(unfinished, _reporter(self._progress, entries))
            missing = ranks.write(doing, writer, entries, partial=partial)
            sums = ranks.gathered(writer.sums)
            found = _Written(unfinished, step, missing, sums)
            return ranks.led(doing, lambda: self._complete(found))
        except BaseException:
            if ranks.leads:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _complete(self, found: _Written) -> Path:
        files = {name: one for each in found.sums for name, one in each.items()}
        order = self._folder.next_order()
        manifest = Manifest(
            found.step, order, len(found.sums), torch.__version__, files, found.missing
        )
        final = self._folder.complete(found.folder, manifest)
        self._damaged.discard(final)  # that one had its name
        if self._keep is not None and not found.missing:
            self._folder.rotate(self._keep, self._damaged)
        return final

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        try:
            self.wait()
        except Exception:
            if error is None:  # else that one is what ended the run
                raise
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            if error is None:  # else peers may be anywhere
                self._ranks.close()


@dataclass(frozen=True)
class _Written:
    """Files of all ranks, on their way to a checkpoint."""

    folder: Path
    step: int
    missing: tuple[str, ...]
    sums: list[dict[str, FileSum]]


def _check_step(step: int) -> None:
    if type(step) is not int or step < 0:
        raise SettingError(f"step={step!r}: a checkpoint is of 0 or more steps, a whole number.")


def _left(state: TrainingState) -> TrainingState:
    """``state``, with nothing of a step under way."""
    for context in {id(u.context): u.context for _, _, u in units_below(state.model)}.values():
        context.reset()
    return state


def _reporter(
    progress: Callable[[Progress], None] | None, entries: dict[str, Any]
) -> Callable[[int], None]:
    if progress is None:
        return lambda count: None
    total = sum(_bytes(tensor) for tensor in tensors(entries))
    written = 0

    def report(count: int) -> None:
        nonlocal written
        written += count
        progress(Progress(written, total))

    return report


def _bytes(tensor: Tensor) -> int:
    return local_tensor(tensor).nbytes if isinstance(tensor, DTensor) else tensor.nbytes
