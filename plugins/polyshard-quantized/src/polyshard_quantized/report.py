"""What was decided for each parameter, and what that does to the bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.layout.exclusions import Exclusions
from polyshard_quantized.layout.payload import Payload, plan_payload


@dataclass(frozen=True)
class ParameterReport:
    """One parameter: how many elements of it this group shards, and why it is excluded if it is."""

    fqn: str
    numel: int
    excluded: str | None
    """The reason, or ``None`` for a parameter that travels quantized."""


@dataclass(frozen=True)
class TransferReport:
    """One kind of transfer of one group. Bytes are what this rank sends to all peers, once.

    ``native_bytes`` is what the engine would send without the plugin, with point-to-point
    transfers (gloo); collectives pad uneven shards and would send a little more.
    """

    group: str
    format: BlockFormat
    parameters: tuple[ParameterReport, ...]
    native_bytes: int
    wire_bytes: int
    replica_bytes: int = 0
    """What this rank sends to its replicas in the second hop of a reduction; 0 where the engine
    sums replicas natively, or there are none. Not part of the other counts."""

    @property
    def quantized_share(self) -> float:
        """Share of the elements that travel quantized, from 0 to 1."""
        total = sum(p.numel for p in self.parameters)
        served = sum(p.numel for p in self.parameters if p.excluded is None)
        return served / total if total else 0.0

    def notices(self, what: str) -> tuple[str, ...]:
        """Lines for ``describe()``: how much is quantized, and every exclusion with its reason.

        Names are those within the group, so that the lines of equal groups are equal.
        """
        head = (
            f"quantized {what}: {self.wire_bytes:,} bytes for "
            f"{self.native_bytes:,} native, {self.quantized_share:.2%} of the elements quantized"
        )
        if self.replica_bytes:
            head += f"; {self.replica_bytes:,} bytes between replicas"
        reasons: dict[str, list[str]] = {}
        for parameter in self.parameters:
            if parameter.excluded is not None:
                name = parameter.fqn.removeprefix(f"{self.group}.")
                reasons.setdefault(parameter.excluded, []).append(name)
        left = (
            f"quantized {what}: native because {reason}: {', '.join(fqns)}"
            for reason, fqns in reasons.items()
        )
        return (head, *left)


@dataclass(frozen=True)
class GroupReport:
    """One parameter group; ``None`` where the plugin leaves that transfer to the engine."""

    name: str
    gather: TransferReport | None
    reduce: TransferReport | None


@dataclass(frozen=True)
class Report:
    """All groups a plugin object serves. ``print`` it, or read its numbers."""

    groups: tuple[GroupReport, ...]
    unused_patterns: tuple[str, ...] = ()
    """Name patterns of the exclusions that match no parameter of these groups."""

    def _sum(self, field: str) -> int:
        transfers = (t for g in self.groups for t in (g.gather, g.reduce) if t is not None)
        return sum(getattr(t, field) for t in transfers)

    @property
    def native_bytes(self) -> int:
        """What all these transfers would send once without the plugin."""
        return self._sum("native_bytes")

    @property
    def wire_bytes(self) -> int:
        """What all these transfers send once."""
        return self._sum("wire_bytes")

    @override
    def __str__(self) -> str:
        lines = [
            f"{group.name}: {line}"
            for group in self.groups
            for what, transfer in (("gather", group.gather), ("reduce", group.reduce))
            if transfer is not None
            for line in transfer.notices(what)
        ]
        ratio = f" ({self.wire_bytes / self.native_bytes:.3f}x)" if self.native_bytes else ""
        lines.append(f"in all {self.wire_bytes:,} bytes for {self.native_bytes:,} native{ratio}")
        if self.unused_patterns:
            lines.append(f"patterns that match no parameter: {', '.join(self.unused_patterns)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Coverage:
    """Which parameters of a group a format serves."""

    format: BlockFormat
    excluded: Mapping[int, str]
    absent: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        group: GroupInfo,
        layout: GroupLayout,
        form: BlockFormat,
        exclusions: Exclusions,
        absent: frozenset[int] = frozenset(),
    ) -> Coverage:
        """Decide for every parameter; ``absent`` ones do not travel at all."""
        excluded = {}
        for index, (param, placed) in enumerate(
            zip(group.parameters, layout.parameters, strict=True)
        ):
            reason = exclusions.reason(param, placed, form)
            if reason is not None:
                excluded[index] = reason
        return cls(form, excluded, absent)

    def payload(self, layout: GroupLayout, raw_dtype: torch.dtype) -> Payload | None:
        """Lay out the payload; ``None`` when nothing would be quantized."""
        plan = plan_payload(layout, self.format, self.excluded, self.absent, raw_dtype)
        return plan if plan.quantized else None

    def parameters(self, group: GroupInfo, layout: GroupLayout) -> tuple[ParameterReport, ...]:
        """What was decided, parameter by parameter."""
        return tuple(
            ParameterReport(param.fqn, placed.numel, self.excluded.get(index))
            for index, (param, placed) in enumerate(
                zip(group.parameters, layout.parameters, strict=True)
            )
            if index not in self.absent
        )


def gather_report(
    group: GroupInfo, layout: GroupLayout, coverage: Coverage, plan: Payload | None
) -> TransferReport:
    """Bytes of one all-gather."""
    direct = sum(layout.parameters[i].local_numel(group.rank) for i in layout.direct)
    peers = group.world_size - 1
    native = peers * (direct + layout.staged_numel) * group.param_dtype.itemsize
    return TransferReport(
        str(group.identity),
        coverage.format,
        coverage.parameters(group, layout),
        native,
        native if plan is None else peers * plan.nbytes,
    )


def reduce_report(
    group: GroupInfo, layout: GroupLayout, coverage: Coverage, plan: Payload | None
) -> TransferReport:
    """Bytes of one reduction over the shard axis, with gradients of every trainable parameter."""
    present = [i for i in range(len(layout.parameters)) if i not in coverage.absent]
    elements = sum(
        layout.parameters[i].numel - layout.parameters[i].local_numel(group.rank)
        for i in layout.direct
        if i in present
    )
    if any(i in present for i in layout.staged):
        elements += (group.world_size - 1) * layout.staged_numel
    narrow = group.param_dtype.itemsize < group.reduce_dtype.itemsize
    wire = group.param_dtype if narrow else group.reduce_dtype
    native = elements * wire.itemsize
    return TransferReport(
        str(group.identity),
        coverage.format,
        coverage.parameters(group, layout),
        native,
        native if plan is None else (group.world_size - 1) * plan.nbytes,
    )
