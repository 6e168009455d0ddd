"""A user's own communication objects, as FSDP2's setters take them, instead of a transport's.

``set_custom_all_gather`` and ``set_custom_reduce_scatter`` take objects that allocate flat tensors
and are called with one to send and one to receive (``torch.distributed.fsdp``, torch 2.9 to 2.13).
Such an object cannot read a shard where it rests, so what it moves is copied in and out: the price
of its interface. A plugin's collectives backend has no such price.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from polyshard.errors import CustomCommsError, SettingError
from polyshard.memory.streams import streams_of
from polyshard.transport.base import (
    Extents,
    GatherPiece,
    GatherRoute,
    Pending,
    ReduceRoute,
    Transport,
)
from polyshard.transport.collective import AlikeSums, share_first
from polyshard.transport.wrapped import WrappedTransport


class Comm(Protocol):
    """What both kinds have in common."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor to send from or receive into."""
        ...


class AllGather(Comm, Protocol):
    """Gathers one flat tensor per rank."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (``[W * n]``) from everybody's ``input_tensor`` (``[n]``)."""
        ...


class ReduceScatter(Comm, Protocol):
    """Sums one flat tensor and scatters the sum."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (``[n]``) with this rank's part of the sum of ``[W * n]``."""
        ...


@dataclass(frozen=True)
class CustomComms:
    """What a user set; ``None`` leaves that direction to the transport.

    Raises:
        SettingError: for an object that cannot allocate or be called.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None

    def __post_init__(self) -> None:
        """Refuse at once what would fail in the first transfer."""
        for comm in (self.all_gather, self.reduce_scatter):
            given: object = comm
            if given is not None and not (callable(given) and hasattr(given, "allocate")):
                raise SettingError(
                    f"a custom collective needs allocate(size, dtype=, device=) and a call, got "
                    f"{type(given).__name__}; derive it from torch's AllGather or ReduceScatter."
                )

    def __bool__(self) -> bool:
        """Whether anything was set."""
        return self.all_gather is not None or self.reduce_scatter is not None


class _Arriving:
    """A collective in flight, and the copies to make when it has ended."""

    def __init__(
        self,
        work: dist.Work | None,
        targets: list[Tensor],
        sources: list[Tensor],
        sent: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._finish = finish
        self._targets = targets
        self._sources = sources
        self._sent = sent
        self._dropped: weakref.finalize[Any, Any] | None = None
        if work is not None and streams_of(sent.device) is not None:
            # As with a lane: what it uses goes back to the stream it came from, behind its end.
            self._dropped = weakref.finalize(self, _go_behind, work)
            self._dropped.atexit = False

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._dropped is not None:
            self._dropped.detach()
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        if self._finish is not None:
            self._finish()


def _go_behind(work: dist.Work) -> None:
    """What the transfer keeps ends after this."""
    work.wait()


class CustomGather(GatherRoute):
    """All pieces as one flat tensor through the user's all-gather."""

    def __init__(
        self, pieces: Sequence[GatherPiece], comm: AllGather, group: dist.ProcessGroup
    ) -> None:
        """``pieces`` share a region dtype."""
        self._comm = comm
        self._group = group
        self._pieces = [p for p in pieces if p.extents.chunk_numel]
        self._numel = sum(p.extents.chunk_numel for p in self._pieces)
        own, size = sum(p.region[0].nbytes for p in self._pieces), group.size()
        self.sent_bytes = self.received_bytes = own * (size - 1)
        self.scratch_bytes = own * (size + 1)

    @override
    @torch.no_grad()
    def start(self) -> Pending:
        """Pack, call, and leave the copies for the wait."""
        world = self._group.size()
        region = self._pieces[0].region
        own = self._comm.allocate([self._numel], dtype=region.dtype, device=region.device)
        whole = self._comm.allocate([world * self._numel], dtype=region.dtype, device=region.device)
        sizes = [p.extents.chunk_numel for p in self._pieces]
        torch._foreach_copy_(list(own.split(sizes)), [p.source for p in self._pieces])
        work = self._comm(whole, own, self._group, async_op=True)
        arrived = whole.view(world, self._numel).split(sizes, dim=1)
        return _Arriving(work, [p.region for p in self._pieces], list(arrived), own)


class CustomReduce(ReduceRoute):
    """All pieces as one flat tensor through the user's reduce-scatter."""

    def __init__(
        self,
        extents: Sequence[Extents],
        dtype: torch.dtype,
        comm: ReduceScatter,
        group: dist.ProcessGroup,
    ) -> None:
        """``dtype`` is the dtype on the wire and of the sums."""
        self._extents = tuple(extents)
        self._dtype = dtype
        self._comm = comm
        self._group = group
        self._alike = AlikeSums.among(extents, group.size())

    @override
    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """Every rank sends one padded chunk of each piece to each peer."""
        sent = self._chunk_bytes(sources)
        if self._alike is not None and self._group.rank() == 0:
            sent += self._alike.numel(sources) * self._dtype.itemsize
        return (self._group.size() - 1) * sent

    @override
    def scratch_bytes(self, sources: Sequence[Tensor | None]) -> int:
        """What is packed for all ranks, and this rank's part of the sum."""
        return (self._group.size() + 1) * self._chunk_bytes(sources)

    def _chunk_bytes(self, sources: Sequence[Tensor | None]) -> int:
        pairs = zip(sources, self._extents, strict=True)
        return sum(e.chunk_numel for s, e in pairs if s is not None) * self._dtype.itemsize

    @override
    @torch.no_grad()
    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        """Pack rank by rank, call, and leave the copies for the wait."""
        present = [
            (source, out, e.chunk_numel)
            for source, out, e in zip(sources, outs, self._extents, strict=True)
            if source is not None and e.chunk_numel
        ]
        world, device = self._group.size(), outs[0].device
        sizes = [numel for _, _, numel in present]
        total = sum(sizes)
        packed = self._comm.allocate([world * total], dtype=self._dtype, device=device)
        summed = self._comm.allocate([total], dtype=self._dtype, device=device)
        rows = packed.view(world, total).split(sizes, dim=1)
        for (source, _, numel), row in zip(present, rows, strict=True):
            _fill(row, source, numel)
        work = self._comm(summed, packed, self._group, dist.ReduceOp.SUM, async_op=True)
        targets = [out for _, out, _ in present]
        share = None
        if self._alike is not None:
            share = partial(share_first, self._alike.of(sources, outs), self._group)
        return _Arriving(work, targets, list(summed.split(sizes)), packed, share)


def refuse_unused(route: ReduceRoute, names: Sequence[str], instead: str) -> None:
    """Refuse a user's reduce-scatter that would not be called for all gradients of ``names``.

    Raises:
        CustomCommsError: saying what happens ``instead``.
    """
    if isinstance(route, CustomReduce):
        raise CustomCommsError(
            f"set_custom_reduce_scatter() has no effect on gradients of {list(names)}: {instead}. "
            "Leave the custom reduce-scatter out (it may be set to None), or shard this module "
            "without the plugin."
        )


def _fill(rows: Tensor, source: Tensor, chunk_numel: int) -> None:
    """``source`` without trailing padding into ``[W, chunk_numel]`` rows; the rest is zero."""
    full = source.numel() // chunk_numel
    rows[:full].copy_(source[: full * chunk_numel].view(full, chunk_numel))
    if full < rows.shape[0]:
        rest = source[full * chunk_numel :]
        rows[full:].zero_()
        rows[full, : rest.numel()].copy_(rest)


class CustomTransport(WrappedTransport):
    """A transport of which a user replaced one or both directions."""

    can_coalesce = coalesces = False  # the user's objects move one flat tensor

    def __init__(self, inner: Transport, comms: CustomComms, group: dist.ProcessGroup) -> None:
        """``inner`` does what ``comms`` does not; ``group`` is that of the shard axis."""
        super().__init__(inner)
        self._comms, self._group = comms, group
        own = [type(c).__name__ for c in (comms.all_gather, comms.reduce_scatter) if c is not None]
        self.name = f"{inner.name} with {', '.join(own)}"

    @override
    def gather_route(self, pieces: Sequence[GatherPiece], tag: int) -> GatherRoute:
        """The user's all-gather, if set."""
        if self._comms.all_gather is None or not any(p.extents.chunk_numel for p in pieces):
            return self.inner.gather_route(pieces, tag)
        return CustomGather(pieces, self._comms.all_gather, self._group)

    @override
    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        """The user's reduce-scatter, if set."""
        if self._comms.reduce_scatter is None:
            return self.inner.reduce_route(extents, dtype, tag)
        return CustomReduce(extents, dtype, self._comms.reduce_scatter, self._group)

    @override
    def block(self, size: int) -> Transport:  # type: ignore[override]
        """The transport's own: the user's objects know the whole axis only."""
        return self.inner.block(size)
