"""Records every operation of a program as an accelerator would have been given it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from polyshard._torch.recording import DispatchMode, FakeTensor, storage_id
from polyshard.memory import streams
from polyshard_testing.streams.clocks import Clock, Ledger, Race, Timeline, Use
from polyshard_testing.streams.device import COMPUTE, RecordedModule
from polyshard_testing.streams.ranks import bytes_of, one_of

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_USE = {"set_", "resize_", "is_same_size"}
_ASKED = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
"""Operations whose answer the host waits for."""


class Recorder:
    """Records each use of memory with its stream. See [Note: happens before]."""

    def __init__(self) -> None:
        """Start with an empty record."""
        self.timeline = Timeline()
        self.module = RecordedModule(self.timeline)
        self.ledger = Ledger(self.timeline)
        self._addresses: dict[int, int] = {}
        self._host_memory: list[tuple[int, int]] = []
        self._host_results: dict[int, None] = {}
        self._numbers = itertools.count()
        self._is_on = True

    @property
    def races(self) -> list[Race]:
        """Pairs of uses that nothing orders."""
        return self.ledger.races

    def stop(self) -> None:
        """Stop recording."""
        self._is_on = False

    # What others say --------------------------------------------------------------------------

    def is_host_memory(self, start: int, nbytes: int) -> None:
        """Mark bytes as host memory: operations on such memory alone are not launched."""
        self._host_memory.append((start, start + nbytes))
        self.ledger.take(start, nbytes, None)

    def host_uses(self, tensor: Tensor, what: str, *, writes: bool) -> None:
        """Record that a host thread uses memory without an operation, as a file system does."""
        self._see(tensor)
        self._use(self.module.host, [tensor], writes=writes, what=what)

    @contextmanager
    def other_thread(self) -> Iterator[Clock]:
        """Record the block as another thread; pass the clock to :meth:`waited_for` after a join."""
        name = f"thread {next(self._numbers)}"
        ended: Clock = {}
        with self.module.thread(name):
            yield ended
            ended.update(self.timeline.snapshot(name))

    def waited_for(self, ended: Clock) -> None:
        """Record that the host thread has joined the thread of the clock ``ended``."""
        self.timeline.learn(self.module.host, ended)

    def collective(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, is_async: bool
    ) -> Clock:
        """As NCCL: on the current stream, or on one of its own that the current one waits for."""
        actor = self.module.current
        self.module.launched(actor)
        if is_async:
            own = f"collective {next(self._numbers)}"
            self.timeline.learn(own, self.timeline.known(actor))
            actor = own
        for tensor in (*reads, *writes):
            self._see(tensor)
        self._use(actor, reads, writes=False, what=name)
        self._use(actor, writes, writes=True, what=name)
        return self.timeline.snapshot(actor)

    def finish(self, token: Clock) -> None:
        """Record that the current stream waits for a collective."""
        self.timeline.learn(self.module.current, token)

    # Operations -------------------------------------------------------------------------------

    def operation(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """An operation was called."""
        name = func._schema.name.split("::")[-1]
        out = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        if name in _NO_USE or _is_view(func) or any(isinstance(t, FakeTensor) for t in out):
            return
        reads, writes = _operands(func, args, kwargs)
        for tensor in (*reads, *writes):
            self._see(tensor)
        fresh = [t for t in out if self._is_new(t)]
        actor = self._actor([*reads, *writes])
        for tensor in fresh:
            self._take(tensor, on_host=actor == self.module.host)
        if name in _EMPTY:
            return
        self._use(actor, reads, writes=False, what=name)
        self._use(actor, [*writes, *fresh], writes=True, what=name)
        blocks = name in _ASKED or (
            self._crosses([*reads, *writes]) and not _non_blocking(func, args, kwargs)
        )
        if blocks and actor != self.module.host:
            self.module.host_waits(actor)

    def _actor(self, operands: Sequence[Tensor]) -> str:
        if operands and all(self._on_host(t) for t in operands):
            return self.module.host
        self.module.launched(self.module.current)
        return self.module.current

    def _crosses(self, operands: Sequence[Tensor]) -> bool:
        return len({self._on_host(t) for t in operands if t.numel()}) > 1

    def _on_host(self, tensor: Tensor) -> bool:
        found = bytes_of(tensor)
        if found is None:
            return False
        made_there = storage_id(tensor.untyped_storage()) in self._host_results
        return made_there or self._is_host(found[0])

    def _is_host(self, address: int) -> bool:
        return any(start <= address < stop for start, stop in self._host_memory)

    def _use(self, actor: str, tensors: Iterable[Tensor], *, writes: bool, what: str) -> None:
        step = self.timeline.step(actor)
        for tensor in tensors:
            found = bytes_of(tensor)
            if found is not None:
                self.ledger.use(Use(*found, writes, actor, step, what))

    # Memory -----------------------------------------------------------------------------------

    def _is_new(self, tensor: Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) not in self._addresses

    def _take(self, tensor: Tensor, *, on_host: bool) -> None:
        storage = tensor.untyped_storage()
        self._watch(storage)
        if on_host:
            self._host_results[storage_id(storage)] = None
        take = self.ledger.take_on_host if on_host else self.ledger.take
        take(storage.data_ptr(), storage.nbytes(), self.module.current)

    def _see(self, tensor: Tensor) -> None:
        """Memory that was there before, or came by a way that is no operation."""
        if bytes_of(tensor) is None or not self._is_new(tensor):
            return
        storage = tensor.untyped_storage()
        self._watch(storage)
        self.ledger.know(storage.data_ptr(), storage.nbytes(), COMPUTE)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        number = storage_id(storage)
        self._addresses[number] = storage.data_ptr()
        weakref.finalize(storage, self._ended, number).atexit = False

    def _ended(self, number: int) -> None:
        address = self._addresses.pop(number, 0)
        self._host_results.pop(number, None)
        if self._is_on and address and not self._is_host(address):
            self.ledger.give_back(address, self.module.host)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage gave memory back, or took some."""
        number = storage_id(storage)
        if number not in self._addresses:
            if not storage.nbytes():
                return
            self._watch(storage)
        if before:
            self.ledger.give_back(before, self.module.host)
        self._addresses[number] = storage.data_ptr() if storage.nbytes() else 0
        if storage.nbytes():
            self.ledger.take(storage.data_ptr(), storage.nbytes(), self.module.current)


class _Watching(DispatchMode):  # type: ignore[misc]
    """Tells a recorder of every operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        results = func(*args, **(kwargs or {}))
        self._recorder.operation(func, args, kwargs or {}, results)
        return results


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    aliases = [r.alias_info for r in returns]
    return bool(returns) and all(a is not None and not a.is_write for a in aliases)


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        (writes if is_written else reads).extend(tensors)
    return reads, writes


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "non_blocking":
            return bool(args[place] if place < len(args) else kwargs.get("non_blocking"))
    return False


@contextmanager
def recorded(size: int) -> Iterator[Recorder]:
    """Record the block, which runs as rank 0 of ``size`` on a CPU as if on an accelerator.

    Meshes are made on ``"cpu"``; streams and events are those of the recorder. Afterwards its
    ``races`` are the accesses that an accelerator could reorder.
    """
    recorder = Recorder()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.data_ptr() if storage.nbytes() else 0
        found = resize(storage, nbytes)
        recorder.resized(storage, before)
        return found

    streams.streams_of.cache_clear()
    with ExitStack() as stack:
        stack.callback(streams.streams_of.cache_clear)
        modules = mock.patch.object(streams, "device_module", return_value=recorder.module)
        stack.enter_context(modules)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        for room in ("polyshard.agreement.meeting", "polyshard_resilience.alarm.current"):
            stack.enter_context(mock.patch(f"{room}.open_board", return_value=None))
        stack.enter_context(one_of(size, recorder))
        stack.enter_context(_Watching(recorder))
        stack.callback(recorder.stop)
        yield recorder
