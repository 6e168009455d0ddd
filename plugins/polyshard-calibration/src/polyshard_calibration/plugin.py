"""Measured costs of transfers, and a plugin that plans by them.

[Note: what is measured]
A parameter with a transfer of its own costs one more message (or launch); a packed one costs copies
on both sides. Which is cheaper depends on the backend, the machine, the number of ranks and the
size of a chunk, so groups of equal parameters are trained for a few steps in every way the
transport has, by the engine itself: whatever it spends on a parameter, in Python or in memory, is
in the figures. Ways take turns within a size. The slowest rank's median counts, so that all ranks
hold the same figures and make the same plan.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.group.transfers import readable
from polyshard.plugins.contract import Plugin, hookimpl
from polyshard.plugins.seams import Around, CollectivesBackend, GroupInfo
from polyshard.sharding.mesh import MeshRoles, resolve_mesh
from polyshard.transport import Transport, choose_transport
from polyshard_calibration.file import read, write
from polyshard_calibration.threshold import BreakEven, Timing

CHUNK_BYTES = tuple(1 << exponent for exponent in range(12, 21, 2))
"""4 KiB to 1 MiB: below, packing has always won; above, a message is lost among its bytes."""

PARAMETERS = 8
WARMUP, TURNS = 2, 5
_ITEMSIZE = torch.float32.itemsize


class MeasuredBackend(CollectivesBackend):
    """The transports of another backend, with thresholds from a calibration."""

    name = "measured"

    def __init__(self, break_evens: tuple[BreakEven, ...], inner: CollectivesBackend) -> None:
        self._break_evens = break_evens
        self._inner = inner
        self.notices: tuple[str, ...] = ()

    @override
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = self._inner.bind(group, roles)
        if transport.size == 1:
            return transport
        found = [
            b
            for b in self._break_evens
            if (b.transport, b.world_size) == (transport.name, transport.size)
        ]
        if not found:
            self.notices = (
                f"the calibration has nothing for {transport.name} with {transport.size} ranks, so "
                "built-in thresholds hold; measure it with Calibration.measure(mesh)",
            )
            return transport
        apply(transport, found[-1].staging_bytes, coalesces=found[-1].coalesces)
        transport.staging_reason = f"measured with {transport.size} ranks"
        return transport


def apply(transport: Transport, staging_bytes: int, *, coalesces: bool) -> None:
    """Have ``transport`` pack below ``staging_bytes``, and coalesce the rest where it can."""
    transport.staging_bytes = staging_bytes
    if transport.can_coalesce:
        transport.coalesces = coalesces


@dataclass(frozen=True, eq=False)
class Calibration(Plugin):
    """A plugin: choose between packed, direct and coalesced transfers by measured costs.

    Example::

        calibration = Calibration.measure(mesh)   # on all ranks, a second or so
        calibration.save("transfers.json")        # next time: Calibration.load("transfers.json")
        fully_shard(model, mesh=mesh, plugins=[calibration])

    It moves no bytes: it wraps the collectives backend, the engine's own or another plugin's.
    """

    name = "calibration"

    break_evens: tuple[BreakEven, ...]

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> Around[CollectivesBackend]:
        """The transports of the backend that it wraps, with measured thresholds."""
        del group
        return Around(partial(MeasuredBackend, self.break_evens))

    @classmethod
    def measure(cls, *meshes: DeviceMesh) -> Calibration:
        """Measure the shard axes of ``meshes``, or of all ranks without any. Collective.

        Every rank of a mesh calls it at the same point; all get the same figures.

        Args:
            meshes: as for ``fully_shard``: 1-D (shard) or 2-D (replicate, shard).

        Raises:
            MeshError: for a mesh that ``fully_shard`` would refuse.
        """
        resolved = [resolve_mesh(mesh) for mesh in meshes or (None,)]
        try:
            return cls(tuple(b for roles in resolved for b in _measure_axis(roles)))
        finally:
            gc.collect()  # modules and their hooks are cycles, with tens of MiB of buffers

    def save(self, path: str | Path) -> None:
        """Write the figures as JSON; one rank is enough.

        Raises:
            OSError: when ``path`` cannot be written. What was there is kept then.
        """
        write(self.break_evens, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote. Ranks compare it with the rest of their plans.

        Raises:
            SettingError: for a file that is missing or not a calibration.
        """
        return cls(read(Path(path)))

    @override
    def __str__(self) -> str:
        return "\n".join(line for b in self.break_evens for line in _table(b))


def _table(found: BreakEven) -> Iterator[str]:
    kind = "coalesced" if found.coalesces else "direct"
    yield (
        f"{found.transport}, {found.world_size} ranks: packed below "
        f"{readable(found.staging_bytes)}, {kind} from there"
    )
    yield f"{'chunk':>12}{'packed':>12}{'direct':>12}{'coalesced':>12}   (us a parameter and step)"
    for timing in found.timings:
        cells = (timing.packed, timing.direct, timing.coalesced)
        shown = "".join(f"{'' if s is None else f'{1e6 * s:.0f}':>12}" for s in cells)
        yield f"{readable(timing.chunk_bytes):>12}{shown}"


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Forced(Plugin, CollectivesBackend):
    """Every chunk packed, or none."""

    name = "forced"

    staging_bytes: int
    coalesces: bool

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> _Forced:
        del group
        return self

    @override
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = choose_transport(roles, group.device)
        apply(transport, self.staging_bytes, coalesces=self.coalesces)
        return transport


class _Parameters(nn.Module):
    """Equal parameters of which a forward reads one row each."""

    def __init__(self, world_size: int, chunk_bytes: int, device: torch.device) -> None:
        super().__init__()
        shape = (world_size, chunk_bytes // _ITEMSIZE)
        # Of any default dtype: a chunk has the bytes that its row of the table says.
        zeros = partial(torch.zeros, shape, dtype=torch.float32, device=device)
        made = (zeros() for _ in range(PARAMETERS))
        self.weights = nn.ParameterList(made)

    @override
    def forward(self) -> Tensor:
        return torch.stack([weight[0, :1] for weight in self.weights]).sum()


def _measure_axis(roles: MeshRoles) -> Iterator[BreakEven]:
    if roles.shard_axis is None or roles.shard_size == 1:
        return
    transport = choose_transport(roles, roles.device)
    axis = roles.mesh
    if axis.ndim > 1:
        assert axis.mesh_dim_names is not None
        axis = axis[axis.mesh_dim_names[roles.shard_axis]]
    ways = ["packed", "direct"] + (["coalesced"] if transport.can_coalesce else [])
    measured = {size: _medians(axis, roles, size, ways) for size in CHUNK_BYTES}
    agreed = _slowest(
        roles, torch.tensor([list(measured[size]) for size in CHUNK_BYTES], device="cpu")
    )
    timings = tuple(
        Timing(size, *row) for size, row in zip(CHUNK_BYTES, agreed.tolist(), strict=True)
    )
    yield BreakEven.of(transport.name, roles.shard_size, timings)


def _medians(axis: DeviceMesh, roles: MeshRoles, chunk_bytes: int, ways: list[str]) -> list[float]:
    """Seconds a parameter and step, in the order of ``ways``."""
    from polyshard.api import fully_shard

    steps = []
    for way in ways:
        model = _Parameters(roles.shard_size, chunk_bytes, roles.device)
        forced = _Forced(chunk_bytes + 1 if way == "packed" else 0, way == "coalesced")
        fully_shard(model, mesh=axis, plugins=[forced], reshard_after_forward=True)
        steps.append(partial(_step_seconds, model, roles))
    turns = [[step() for step in steps] for _ in range(WARMUP + TURNS)][WARMUP:]
    return [statistics.median(column) / PARAMETERS for column in zip(*turns, strict=True)]


def _step_seconds(model: nn.Module, roles: MeshRoles) -> float:
    dist.barrier(group=roles.shard_group)
    _synchronize(roles.device)
    begin = time.perf_counter()
    loss: Tensor = model()
    loss.backward()
    _synchronize(roles.device)
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _slowest(roles: MeshRoles, seconds: Tensor) -> Tensor:
    """The same on every rank of the mesh."""
    agreed = seconds.to(roles.device)
    for group in (roles.shard_group, *roles.replicate_groups):
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return agreed.cpu()
