"""Process groups that were cut are connected anew, as the objects that they are.

[Note: mending]
Meshes, tensors and users hold the process groups of a mesh, so new ones would help nobody. A group
gets a new backend instead, over a wire (``wire.py``) of its own among the same ranks. All of them
come, each of its groups in the order of their names: a rank in a group with a rank that cut knows
of it (see [Note: who has cut] of ``alarm/cuts.py``). Groups with a rank that will not come back
stay broken. Groups of other backends cannot get a new one: where their ranks are out of step, no
rank goes on.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist

from polyshard._torch.gloo import gloo_groups
from polyshard.errors import ConnectionLostError, OutOfStepError, PeerError
from polyshard_resilience._torch_private import (
    MOST_GROUPS,
    cut_group,
    device_groups,
    reconnect,
)
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.cuts import Broken
from polyshard_resilience.wire import WatchedWire


def mend_groups(alarm: Alarm) -> None:
    """Connect every process group anew that was broken in the epoch which this rank has left.

    All ranks do so before they use one. They wait for each other only if there is one to mend.

    Raises:
        PeerError: when another rank does not come.
        OutOfStepError: on all ranks, when a group of another backend (NCCL) is out of step.
    """
    broken = alarm.broken_groups()
    if broken:
        _mend_all(alarm, broken)


def _mend_all(alarm: Alarm, broken: Broken) -> None:
    groups = gloo_groups()
    final = sorted(broken.apart & device_groups().keys())
    if final:
        raise OutOfStepError(
            f"ranks have begun different numbers of collectives in the process groups {final}, "
            "which cannot be connected anew: the next collective would mix data of different "
            "ones, or never end. Restart the job from the last checkpoint"
        )
    if len(groups) > MOST_GROUPS:
        warnings.warn(
            f"process groups {broken} stay broken: there are {len(groups)}, and at most "
            f"{MOST_GROUPS} are repaired. Destroy unused groups, or restart from the last "
            "checkpoint.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    for name in alarm.mending.keys() - groups.keys():  # destroyed since
        del alarm.mending[name]
    mended = []
    try:
        for name in sorted(groups):
            ranks = tuple(dist.get_process_group_ranks(groups[name]))
            if alarm.gone.keys().isdisjoint(ranks) and broken.includes(name, ranks):
                _mend(alarm, name, groups[name], ranks)
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


def _mend(alarm: Alarm, name: str, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
    wire = WatchedWire(group, alarm, ranks, f"group/{name}")
    known = cast("_Mended", alarm.mending.setdefault(name, _Mended(wire)))
    known.wire.renew()
    connections = known.wire.open()
    if alarm.report is not None:
        raise ConnectionLostError("another failure came first")
    cut_group(group)  # what is still under way there will not end otherwise
    reconnect(group, connections, known.times)
    known.times += 1


@dataclass
class _Mended:
    """One process group."""

    wire: WatchedWire
    times: int = 0
