"""Every private torch name the package uses: connections over gloo, made, cut and replaced.

[Note: cutting]
gloo has no call that ends a transfer under way (torch's ``abort()`` does nothing there). But a
receive that is not answered in time makes gloo close every pair of its context, which ends all that
waits in it, in whatever thread, with an error; and since a pair is a TCP connection, the other end
is woken as well. So whoever wants all of it to end waits for a message that nobody sends, for a
millisecond. What was cut stays so: new connections are made.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from polyshard._torch.gloo import BESIDE, backend_on_cpu, gloo_groups
from polyshard.errors import ConnectionLostError

CUT_TAG = (1 << 31) - 1
"""No transfer has it."""
_MOMENT = timedelta(milliseconds=1)
COLLECTIVES = frozenset((distributed_c10d.__file__, _functional_collectives.__file__))
"""Files that all collectives pass through, whoever makes them."""
_OF_GLOO = re.compile("gloo/transport|pair closure")
MOST_GROUPS = 64
"""To mend more would take longer than to start again. A mesh has one for each of its axes."""
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

    A process group that torch's registry does not know: its name is nobody's business, and it goes
    when nobody holds it. Modes of torch's dispatcher see its operations like those of any other.
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
    """One for the process: what was mended once stays, without connections."""
    return dist.ProcessGroupGloo.create_default_device()


def forget_gloo(store: dist.Store, name: str, rank: int) -> None:
    """Take back what :func:`connect_gloo` left in ``store`` for others, who have read it."""
    store.delete_key(f"{name}/0/{rank}")


def cut_gloo(connections: dist.ProcessGroup) -> None:
    """End all that waits in ``connections``, here and at the other ends. See [Note: cutting]."""
    own = connections.rank()
    for peer in range(connections.size()):
        if peer != own:  # one whose pair is closed already does not end the others
            with suppress(RuntimeError):
                connections.recv([torch.empty(1, device="cpu")], peer, CUT_TAG).wait(_MOMENT)


def is_from_gloo(error: RuntimeError) -> bool:
    """Whether gloo raised ``error`` about a connection: one that broke, or a wait that was over."""
    return bool(_OF_GLOO.search(str(error)))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long transfers of ``group`` wait on the CPU."""
    options = getattr(backend_on_cpu(group), "options", None)
    found = getattr(options, "_timeout", None)
    return (
        found
        if isinstance(found, timedelta)
        else distributed_c10d._get_default_timeout(dist.Backend("gloo"))
    )


def own_client(store: dist.Store) -> dist.Store:
    """A client of ``store`` for another thread: one that waits does not keep others waiting.

    Only where that is a matter of connections: files and memory are shared as they are (a file
    counts its clients, and is removed with the last).
    """
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    return cast("Any", store).clone() if isinstance(base, dist.TCPStore) else store


def begun_collectives() -> dict[str, int]:
    """How many collectives each process group has begun, but for :data:`BESIDE` groups.

    By the names of :func:`gloo_groups` and :func:`device_groups`. A backend may not count; and
    nothing is counted where there are more than :data:`MOST_GROUPS`.
    """
    found: dict[str, Any] = {n: (g, backend_on_cpu(g)) for n, g in gloo_groups().items()}
    found.update(device_groups())
    counts = {}
    for name, (group, backend) in found.items() if len(found) <= MOST_GROUPS else ():
        with suppress(RuntimeError):  # a backend that does not count
            if group.group_desc != BESIDE:
                counts[name] = backend._get_sequence_number_for_group()
    return counts


def device_groups() -> dict[str, tuple[dist.ProcessGroup, Any]]:
    """Process groups and what each runs on beside gloo (NCCL), by names that all ranks know."""
    found = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        first = dist.get_process_group_ranks(group)[0]
        devices: Any = {device.type: group._get_backend(device) for device in group._device_types}
        for device, backend in (devices or {"": group}).items():
            if not isinstance(backend, dist.ProcessGroupGloo):
                found[f"{name}/{first}/{device}"] = group, backend
    return found


def cut_groups() -> None:
    """End all that waits on the CPU in any process group of this process."""
    for group in gloo_groups().values():
        cut_group(group)


def cut_group(group: dist.ProcessGroup) -> None:
    """End all that waits on the CPU in ``group``."""
    cut_gloo(cast("dist.ProcessGroup", backend_on_cpu(group)))


def reconnect(group: dist.ProcessGroup, connections: dist.ProcessGroup, number: int) -> None:
    """Have ``group`` do its work on the CPU over other ``connections`` of the same ranks.

    A group keeps one backend of each type for good. So this one comes under a type of its own, and
    the old one stays behind without connections: two threads that wait for nothing.

    Args:
        group: Of torch's registry.
        connections: What :func:`connect_gloo` made.
        number: How often the group has been reconnected before.

    Raises:
        ConnectionLostError: when there are no types left, after more than 200 times.
    """
    if number >= len(_TYPES):
        raise ConnectionLostError(f"it was reconnected {number} times before, which is the most")
    kinds = dist.ProcessGroup.BackendType
    kind: Any = kinds(_TYPES[number])
    backend: Any = backend_on_cpu(connections)
    group._register_backend(torch.device("cpu"), kind, backend)
    if distributed_c10d._world.pg_map[group][0] == dist.Backend.GLOO:
        group._set_default_backend(kind)
