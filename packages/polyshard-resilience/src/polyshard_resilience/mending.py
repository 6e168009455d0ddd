"""Process groups that were cut or aborted are connected anew, as the objects that they are.

[Note: repaired groups]
Meshes, tensors and users hold the process groups of a mesh, so new groups would not help. A group
gets a new backend instead: on gloo over a wire (``wire.py``) of its own among the same ranks, on a
device one that torch makes anew, when all of the ranks have met. All of them come, each to its
groups in the order of their names: a rank in a group with a rank that cut knows of it (see
[Note: who has cut] of ``alarm/cuts.py``). Groups with a rank that will not come back stay broken.
Other kinds of backends cannot be made anew: where their ranks are out of step, all ranks raise.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import cast

from polyshard._torch.gloo import backend_on_cpu
from polyshard.errors import ConnectionLostError, OutOfStepError, PeerError
from polyshard_resilience._torch_private import (
    MOST_GROUPS,
    Working,
    abort,
    are_too_many,
    await_devices,
    cut_gloo,
    replace,
    workings,
)
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.cuts import Broken
from polyshard_resilience.wire import WatchedWire


def mend_groups(alarm: Alarm) -> None:
    """Connect every process group anew that was broken in the epoch which this rank has left.

    All ranks do so before they use one. They wait for each other only if there is one to repair.

    Raises:
        PeerError: when another rank does not come.
        OutOfStepError: on all ranks, when a group is out of step whose backend cannot be made anew.
    """
    broken = alarm.broken_groups()
    if broken:
        _mend_all(alarm, broken)


def _mend_all(alarm: Alarm, broken: Broken) -> None:
    found = workings()
    final = sorted(name for name in broken.apart & found.keys() if not _can_be_mended(found[name]))
    if final:
        raise OutOfStepError(
            f"ranks have begun different numbers of collectives in the process groups {final}, "
            "which cannot be connected anew: the next collective would mix data of different "
            "ones, or never end. Restart the job from the last checkpoint"
        )
    if are_too_many(found):
        warnings.warn(
            f"process groups {broken} stay broken: there are more than {MOST_GROUPS}, and no more "
            "are repaired. Destroy unused groups, or restart from the last checkpoint.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    for name in alarm.mending.keys() - found.keys():  # destroyed since
        del alarm.mending[name]
    affected = {
        name: working
        for name, working in sorted(found.items())
        if broken.includes(name, working.breakers)
    }
    _quieten(affected)
    mended, lost = [], alarm.gone.keys() | alarm.register.ended(alarm.away)
    try:
        for name, working in affected.items():
            if lost.isdisjoint(working.ranks):
                _mend(alarm, name, working)
                mended.append(name)
    except ConnectionLostError as error:
        alarm.say_cut()
        if alarm.report is not None:
            raise alarm.because("process groups could not be repaired") from error
        raise PeerError(
            f"process groups {broken} could not be repaired: {error}. Call reset_iter_state() "
            "on every rank, or restart from the last checkpoint."
        ) from error
    if mended or alarm.rank in broken.cut:
        alarm.say_mended(mended)


def _can_be_mended(working: Working) -> bool:
    return working.is_gloo or working.maker is not None


def _quieten(affected: dict[str, Working]) -> None:
    """Nothing is under way on a device any more, which this rank or another has aborted."""
    devices = {name: working for name, working in affected.items() if not working.is_gloo}
    if devices:
        abort(devices)
        await_devices()


def _mend(alarm: Alarm, name: str, working: Working) -> None:
    wire = WatchedWire(working.group, alarm, working.ranks, f"group/{name}")
    known = cast("_Mended", alarm.mending.setdefault(name, _Mended(wire)))
    known.wire.renew()
    backend = _made_anew(known.wire, working)
    if alarm.report is not None:
        raise ConnectionLostError("another failure came first")
    group = name.rpartition("/")[0]
    every = [cast("_Mended", each) for n, each in alarm.mending.items() if _group_of(n) == group]
    replace(working, backend, sum(each.times for each in every))
    known.times += 1


def _group_of(name: str) -> str:
    return name.rpartition("/")[0]


def _made_anew(wire: WatchedWire, working: Working) -> object:
    if working.maker is not None:
        return wire.make(working.maker)
    connections = wire.open()
    cut_gloo(working.backend)  # what is still under way there will not end otherwise
    return backend_on_cpu(connections)


@dataclass
class _Mended:
    """One process group, on one type of device."""

    wire: WatchedWire
    times: int = 0
