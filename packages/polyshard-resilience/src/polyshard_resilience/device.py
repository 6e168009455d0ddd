"""The end of a step on a device, which the host of each rank waits for.

[Note: end of a step on a device]
A host runs ahead of its device: it would launch the optimizer's step behind a reduction that never
ends. Once that is aborted, the step would change weights by what memory happens to hold. And
collectives on a device pair by order: ranks that run layers in another order, or have gradients of
other parameters, mix their data without a word. So at the end of a backward ranks compare which
forwards it belongs to and which parameters had no gradient, by a collective of
16 bytes behind all others, and the host waits for it. What ranks compare is also what they wait
for: where it differs, or never comes because of that, they stand at different places (see
[Note: ranks apart] of ``alarm/positions.py``). No optimizer steps after a backward that reduces
nothing: its forwards are compared with those of the next that does, and a rank may leave it out.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from polyshard._torch.private import store_timeout_seconds
from polyshard.errors import ConnectionLostError
from polyshard.failures import Ended
from polyshard.memory.streams import launched, streams_of
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.reports import NOBODY, Cause, Report
from polyshard_resilience.wire import LOOK_SECONDS, Waiter

KEPT = 4
"""Steps that a rank remembers to have ended; another one is at most one behind."""
NAMED = 8
"""Forwards, and parameters, that a rank names where it says where it is."""


@dataclass
class _Launched:
    """What a device was given so far; for :class:`~polyshard_resilience.wire.Waiter`."""

    run: Callable[[], None]
    is_left: bool = False


_SPOILED = (
    "ranks at the same place found on the device that they differ: its memory was overwritten, "
    "by a collective or copy that something did not wait for"
)


@dataclass(frozen=True)
class DeviceWait:
    """The host waits for a device, which waits for other ranks; see ``alarm.Waiting``."""

    own: int
    ranks: tuple[int, ...]
    key: str

    def peers(self) -> tuple[int, ...]:
        """See there."""
        return self.ranks

    def place(self) -> tuple[int, str, int]:
        """See there: one rank waits for all, and all others for this one, to compare with."""
        first = min(self.ranks)
        return NOBODY if first == self.own else first, self.key, 1


class DeviceSteps:
    """Those of one alarm's rank. See [Note: end of a step on a device]."""

    def __init__(self, alarm: Alarm) -> None:
        """No step has ended."""
        self._alarm = alarm
        self._waiter = Waiter()
        self._ended: deque[str] = deque(maxlen=KEPT)
        self._epoch, self._counts = alarm.epoch, Counter[tuple[int, ...]]()

    def end(self, ended: Iterator[Ended], forwards: Iterable[str]) -> None:
        """Return when the device is through with the backward of ``forwards`` in all of ``ended``.

        Raises:
            PeerError: when another rank failed.
            ControlFlowError: when another rank's forwards, or parameters with gradients, were
                others. Experts may differ between ranks that divide them: not compared are
                parameters whose mesh holds some of these ranks only.
        """
        first = next(ended, None)
        device = torch.device("cpu") if first is None else _device_of(first.mesh)
        if first is None or not _is_awaited(device):
            return
        alarm, units = self._alarm, (first, *ended)
        meshes = {id(each.mesh): each.mesh for each in units}
        ranks_of = {key: frozenset(mesh.mesh.flatten().tolist()) for key, mesh in meshes.items()}
        ranks = tuple(sorted(frozenset[int]().union(*ranks_of.values())))
        shared = [each for each in units if len(ranks_of[id(each.mesh)]) == len(ranks)]
        lacking = tuple(name for each in shared for name in each.lacking)
        alarm.expect(ranks)
        every = tuple(forwards)
        said = zlib.crc32(f"{self._count(ranks)} {every} {lacking}".encode())
        alarm.doing = f"the end of a backward, after forwards of {_names(every[-NAMED:])}"
        if lacking:
            alarm.doing += f", without gradients of {_names(lacking[:NAMED])}"
        alarm.waiting = DeviceWait(alarm.rank, ranks, self._come(f"{alarm.epoch}:{said}"))
        try:
            differs = _compare(said, meshes.values(), device)
            self._wait(launched(device))
            if alarm.report is not None or differs[0].item() != -differs[1].item():
                self._wait_for_report()  # if there is one, what ended was perhaps aborted
        except (ConnectionLostError, dist.DistBackendError) as error:
            if alarm.report is None:
                raise
            raise alarm.because("the backward did not complete") from error
        finally:
            alarm.waiting = None

    def _count(self, ranks: tuple[int, ...]) -> int:
        """How many steps of these ranks have ended since the last failure."""
        if self._epoch != self._alarm.epoch:
            self._epoch = self._alarm.epoch
            self._counts.clear()
        self._counts[ranks] += 1
        return self._counts[ranks]

    def _wait(self, wait: Callable[[], None]) -> None:
        self._waiter.wait(_Launched(wait), lambda: self._alarm.report is not None)

    def _wait_for_report(self) -> None:
        """All ranks know that they are apart, and look for where each is.

        Where they are not, what they compared was overwritten, and no rank reports anything.
        """
        alarm, begin = self._alarm, time.monotonic()
        assert alarm.board is not None
        limit = store_timeout_seconds(alarm.board.store)
        while alarm.report is None:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() - begin > limit:
                alarm.ring(Report(NOBODY, Cause.RAISED, _SPOILED))
        raise ConnectionLostError("the step is lost")

    def _come(self, key: str) -> str:
        """Remember that the step of this ``key`` has ended."""
        gathered = self._alarm.gathered
        if len(self._ended) == KEPT:
            gathered.pop(self._ended[0], None)
        self._ended.append(key)
        gathered[key] = 1
        return key


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    if mesh.device_type in {"cpu", "meta"}:
        return torch.device(mesh.device_type)
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _is_awaited(device: torch.device) -> bool:
    """Whether work is left under way there; a graph that is captured runs later, if at all."""
    streams = streams_of(device)
    is_capturing = getattr(streams and streams.module, "is_current_stream_capturing", bool)
    return streams is not None and not is_capturing()


def _compare(said: int, meshes: Iterable[DeviceMesh], device: torch.device) -> torch.Tensor:
    """The largest of what ranks say, and the largest negated, when the device comes to it."""
    axes = ((mesh, axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    groups = {id(group): group for group in (mesh.get_group(axis) for mesh, axis in axes)}
    largest = torch.tensor([said, -said], dtype=torch.int64, device=device)
    for group in groups.values():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest
