"""Every private torch name the package uses: backends of process groups, made, cut and replaced.

[Note: cutting]
gloo has no call that ends a transfer under way (torch's ``abort()`` does nothing there). But a
receive that is not answered in time makes gloo close every pair of its context, which ends all that
waits in it, in whatever thread, with an error; and since a pair is a TCP connection, the other end
is woken as well. So a rank that wants to end all of it waits a millisecond for a message that no
rank sends. What was cut stays cut: new connections are made.

[Note: aborting]
On a device a collective that a rank does not join keeps its stream for ever. ``abort()`` ends it
and all later ones of the communicator: the stream continues with whatever its memory holds, and no
wait of the host raises anything. torch's own ``_abort_process_group`` also forgets the groups,
which meshes and users still hold. Here they stay, and get backends made anew as torch makes them
(``_new_process_group_helper``). To abort one communicator is to free its memory, for which CUDA
waits until the device is idle, so behind collectives of other communicators that never end. All
must be aborted at once, each on a thread of its own: NCCL's groups of calls (``_group_start``) do
not do that, since torch aborts on yet another thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from polyshard._torch.gloo import BESIDE
from polyshard._torch.private import timeout_of
from polyshard.errors import ConnectionLostError

CUT_TAG = (1 << 31) - 1
"""No transfer has it."""
_MOMENT = timedelta(milliseconds=1)
COLLECTIVES = frozenset((distributed_c10d.__file__, _functional_collectives.__file__))
"""Files that all collectives pass through, in the engine and elsewhere."""
_OF_GLOO = re.compile("gloo/transport|pair closure")
MOST_GROUPS = 64
"""To repair more would take longer than to restart. A mesh has one for each of its axes."""
_TYPES = range(32, 256)
"""Of backends: a byte, far above those that torch knows."""


def connect_gloo(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    on_shared_device: bool = False,
) -> dist.ProcessGroup:
    """Connections of ``size`` ranks, which all ask for the same ``name`` of ``store``.

    A process group that torch's registry does not know: it needs no name there, and is freed when
    it is held no more. Modes of torch's dispatcher see its operations like those of any other.
    On the shared device (its files and its thread) they cost no more of these, however often.
    """
    prefixed = dist.PrefixStore(name, store)
    made = dist.ProcessGroup(prefixed, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    made._set_default_backend(kind)
    options: Any = timeout
    if on_shared_device:
        options = cast("Any", dist.ProcessGroupGloo)._Options()
        options._timeout, options._devices = timeout, [_shared_device()]
    backend: Any = dist.ProcessGroupGloo(prefixed, rank, size, options)
    made._register_backend(torch.device("cpu"), kind, backend)
    return made


@functools.cache
def _shared_device() -> Any:
    """One for the process: connections that were repaired once keep it for good."""
    return dist.ProcessGroupGloo.create_default_device()


def forget_gloo(store: dist.Store, name: str, rank: int) -> None:
    """Take back what :func:`connect_gloo` left in ``store`` for other ranks, which have read it."""
    store.delete_key(f"{name}/0/{rank}")


def cut_gloo(connections: dist.ProcessGroup) -> None:
    """End all that waits in ``connections``, here and at the other ends. See [Note: cutting]."""
    own = connections.rank()
    for peer in range(connections.size()):
        if peer != own:  # one whose pair is closed already does not end the others
            with suppress(RuntimeError):
                connections.recv([torch.empty(1, device="cpu")], peer, CUT_TAG).wait(_MOMENT)


def is_from_backend(error: RuntimeError) -> bool:
    """Whether ``error`` is about connections: one that broke, was aborted, or took too long."""
    return isinstance(error, dist.DistBackendError) or bool(_OF_GLOO.search(str(error)))


def own_client(store: dist.Store) -> dist.Store:
    """A client of ``store`` for another thread: one that waits does not keep others waiting.

    Only where that is a matter of connections: files and memory are shared as they are (a file
    counts its clients, and is removed with the last).
    """
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    return cast("Any", store).clone() if isinstance(base, dist.TCPStore) else store


@dataclass(frozen=True)
class Working:
    """What a process group does its work with on one type of device."""

    group: dist.ProcessGroup
    device: str
    backend: Any

    @property
    def is_gloo(self) -> bool:
        """Whether it is cut and connected over a wire."""
        return isinstance(self.backend, dist.ProcessGroupGloo)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ones of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def breakers(self) -> tuple[int, ...]:
        """The ranks that break it when they cut their groups."""
        return self.ranks if self.is_gloo else ()

    @property
    def maker(self) -> Callable[[dist.Store], Any] | None:
        """Makes the backend of a device anew, over an empty store; ``None`` where none can be."""
        if _is_nccl(self.backend):
            return self._make_nccl
        if self.device in ("", "cpu") or isinstance(self.backend, dist.ProcessGroup):
            return None
        plugin = cast("Any", dist.Backend)._plugins.get(self.backend.name().upper())
        return None if plugin is None or not plugin.extended_api else self._make_extension

    def _make_nccl(self, store: dist.Store) -> Any:
        options, kind = self.backend.options, cast("Any", dist).ProcessGroupNCCL
        options.split_from = None  # a communicator that was aborted as well
        made = kind(store, self.group.rank(), self.group.size(), options)
        made._set_sequence_number_for_group()
        return made

    def _make_extension(self, store: dist.Store) -> Any:
        options = cast("Any", distributed_c10d)._DistributedBackendOptions()
        options.store, options.timeout = store, timeout_of(self.group)
        options.group_rank, options.group_size = self.group.rank(), self.group.size()
        options.group_id = self.group.group_name
        options.global_ranks_in_group = list(self.ranks)
        plugin = cast("Any", dist.Backend)._plugins[self.backend.name().upper()]
        return plugin.creator_fn(options, None)


def _is_nccl(backend: object) -> bool:
    kind = getattr(dist, "ProcessGroupNCCL", None)  # a build for the CPU has none
    return kind is not None and isinstance(backend, kind)


def workings() -> dict[str, Working]:
    """Of the process groups of this process, by names that all ranks know.

    Gloo on the CPU, and everything else that there is on any device.
    """
    found = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        with suppress(KeyError, ValueError):  # another thread destroys it
            first = dist.get_process_group_ranks(group)[0]
            on: Any = {device.type: group._get_backend(device) for device in group._device_types}
            for device, backend in (on or {"": group}).items():
                working = Working(group, device, backend)
                if device == "cpu" or not working.is_gloo:
                    found[f"{name}/{first}/{device}"] = working
    return found


def begun_collectives() -> dict[str, int]:
    """How many collectives each process group has begun, but for :data:`BESIDE` groups.

    By the names of :func:`workings`. A backend may not count; and nothing is counted where there
    are more groups than :data:`MOST_GROUPS`.
    """
    found, counts = workings(), {}
    for name, working in found.items() if not are_too_many(found) else ():
        with suppress(RuntimeError):  # a backend that does not count
            if working.group.group_desc != BESIDE:
                counts[name] = working.backend._get_sequence_number_for_group()
    return counts


def are_too_many(found: dict[str, Working]) -> bool:
    """Whether there are more process groups than :data:`MOST_GROUPS`."""
    return len({id(working.group) for working in found.values()}) > MOST_GROUPS


def cut_groups() -> None:
    """End all that waits on the CPU in any process group of this process."""
    for working in workings().values():
        if working.is_gloo:
            cut_gloo(working.backend)


def on_devices() -> dict[str, Working]:
    """Those of :func:`workings` that :func:`abort` ends, and that can be made anew."""
    return {name: each for name, each in workings().items() if each.maker is not None}


def abort(found: dict[str, Working]) -> None:
    """End all that waits on a device in any of :func:`on_devices`. See [Note: aborting]."""
    if found:
        with ThreadPoolExecutor(len(found), "polyshard-abort") as pool:
            list(pool.map(lambda each: each.backend.abort(), found.values()))


def await_devices() -> None:
    """Wait for all that was launched on this process's device, to the end of what was aborted."""
    if torch.accelerator.is_available():
        with suppress(dist.DistBackendError):  # how it ended does not matter any more
            torch.accelerator.synchronize()


def replace(working: Working, backend: Any, number: int) -> None:
    """Have the group do its work with another ``backend`` of the same ranks.

    A group keeps one backend of each type for good. So this one comes under a type of its own, and
    the old one stays behind without connections: on gloo, two threads that wait for nothing.

    Args:
        working: of a group of torch's registry.
        backend: made for it.
        number: How often the group has had something replaced before.

    Raises:
        ConnectionLostError: when there are no types left, after more than 200 times.
    """
    if number >= len(_TYPES):
        raise ConnectionLostError(f"it was reconnected {number} times before, which is the most")
    kinds = dist.ProcessGroup.BackendType
    kind: Any = kinds(_TYPES[number])
    group, world = cast("Any", working.group), distributed_c10d._world
    called, described = group.group_name, group.group_desc  # which it asks a backend for
    name = "gloo" if working.is_gloo else working.backend.name().lower()
    group._register_backend(torch.device(working.device), kind, backend)
    if world.pg_map[group][0].lower() == name:
        group._set_default_backend(kind)
    group._set_group_name(called)
    group._set_group_desc(described)
    # What a coalesced launch had gathered when it was broken off would refuse the next one.
    cast("Any", world).pg_coalesce_state.pop(group, None)


def may_be_written(tensor: torch.Tensor) -> bool:
    """Whether torch writes to ``tensor`` in place: not where elements share memory (``expand``)."""
    shares: int = torch._debug_has_internal_overlap(tensor)
    return shares != 1


def hooks_after_step(optimizer: torch.optim.Optimizer) -> list[object]:
    """What was registered to be called after steps of this optimizer."""
    return list(optimizer._optimizer_step_post_hooks.values())


class ScalerStages:
    """What a ``GradScaler`` knows of its optimizers in this step, which its state dict leaves out.

    It refuses to unscale gradients twice, and does not scale those of a step that was undone.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        """Keep it."""
        self._scaler = scaler
        self._kept = {key: _copied(state) for key, state in scaler._per_optimizer_states.items()}

    def put_back(self) -> None:
        """Forget what came since."""
        states = self._scaler._per_optimizer_states
        states.clear()
        states.update({key: _copied(state) for key, state in self._kept.items()})


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy with tensors of its own; ``found_inf`` is by device."""
    found = {device: value.clone() for device, value in state["found_inf_per_device"].items()}
    return {**state, "found_inf_per_device": found}
