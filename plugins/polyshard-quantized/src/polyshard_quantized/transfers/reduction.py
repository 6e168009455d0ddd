"""The reduce codec: all-to-all of quantized chunks, summed in ``float32`` in rank order.

A gradient is quantized once on each hop. The first hop runs over the shard axis; on a mesh with
replicas the sums are quantized again and every replica sends its own to all others, so that each
adds the same terms in the same order and replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.plugins.seams import BoundReduceCodec, BoundReplicaCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard_quantized.arithmetic.codec import BlockCodec, Nearest, Rounding
from polyshard_quantized.arithmetic.rounding import Stochastic
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.layout.blocks import Tile
from polyshard_quantized.layout.exclusions import Exclusions
from polyshard_quantized.layout.payload import Payload
from polyshard_quantized.layout.tensors import Parts, Piece, pieces, rank_pieces, rows_of
from polyshard_quantized.report import Coverage, TransferReport, reduce_report
from polyshard_quantized.transfers.feedback import ErrorFeedback, Residuals
from polyshard_quantized.transfers.gather import ShardEncoder
from polyshard_quantized.transfers.state import ReductionState
from polyshard_quantized.workspace import Workspace, chunk_elements

RoundingName = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are quantized; see :class:`polyshard_quantized.QuantizedComm`."""

    format: BlockFormat
    rounding: RoundingName
    seed: int
    error_feedback: ErrorFeedback | None
    hierarchical: bool


class Summation:
    """Decodes payloads of several ranks and adds them in rank order, in ``float32``."""

    def __init__(self, codec: BlockCodec, workspace: Workspace) -> None:
        """``codec`` knows the format."""
        self._decode = codec.decode
        self._workspace = workspace

    def add(self, out: Tensor, parts: Parts, tiles: Sequence[Tile]) -> None:
        """Overwrite the tiles of ``out`` (``[n]``) with the sum over all payloads."""
        limit = chunk_elements(out.device)
        for tile in tiles:
            for terms in rank_pieces(out, parts, tile, limit):
                self._add(terms)

    def _add(self, terms: Sequence[Piece]) -> None:
        first, *others = terms
        out, take = first.values, self._workspace.take
        total = out
        if out.dtype != torch.float32:
            total = take("sum", out.shape, torch.float32, out.device)
        self._decode(first.codes, first.scales, total)
        if others:
            term = take("decoded", out.shape, torch.float32, out.device)
            for piece in others:
                self._decode(piece.codes, piece.scales, term)
                total.add_(term)
        if total is not out:
            out.copy_(total)


def add_rows(outs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Sum ``[R, n]`` of each into its ``[n]``, as the engine does: in rank order, in its dtype."""
    if not outs:
        return
    torch._foreach_copy_(list(outs), [r[0] for r in rows])
    for rank in range(1, rows[0].shape[0]):
        torch._foreach_add_(list(outs), [r[rank] for r in rows])


class BoundReplicas(BoundReplicaCodec):
    """The second hop, over the replicate axis. Works on flat ``[shard_numel]`` sums."""

    def __init__(
        self, plan: Payload, codec: BlockCodec, workspace: Workspace, noise: _Noise | None
    ) -> None:
        """The same payload as that of the first hop, once for the whole shard."""
        self.payload_bytes = plan.nbytes
        self._plan = plan
        self._codec = codec
        self._noise = noise
        self._summation = Summation(codec, workspace)

    @override
    def encode(self, total: Tensor, payload: Tensor) -> None:
        if self._noise is not None:
            self._encode_each(total, payload, self._noise)
            return
        # An encoder for one use: one that stays would keep the gradients' memory alive.
        ShardEncoder(self._plan, self._codec).encode(total, payload)

    def _encode_each(self, total: Tensor, payload: Tensor, noise: _Noise) -> None:
        """Parameter by parameter, each with noise of its own. See [Note: noise]."""
        flat, parts = total[None], Parts(payload[None], self._plan)
        limit = chunk_elements(payload.device)
        for quantized in self._plan.quantized:
            noise.begin("replicas", quantized.index)
            for tile in quantized.tiles:
                for piece in pieces(flat, parts, tile.moved(quantized.shard_offset), limit):
                    self._codec.encode(piece.values, piece.codes, piece.scales)
        for raw in self._plan.raw:
            source = total[raw.shard_offset : raw.shard_offset + raw.numel]
            parts.raw_rows(raw)[0].copy_(source)

    @override
    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        parts = Parts(payloads, self._plan)
        self._summation.add(total, parts, self._plan.shard_tiles)
        raw = self._plan.raw
        outs = [total[r.shard_offset : r.shard_offset + r.numel] for r in raw]
        add_rows(outs, [parts.raw_rows(r) for r in raw])


@dataclass(frozen=True)
class _Noise:
    """Where the noise of a group's reductions starts.

    [Note: noise]
    Ranks that hold the same values must draw the same noise, or what they hold drifts apart: beside
    tensor parallelism a parameter outside its plan is whole on every tensor-parallel rank. So noise
    follows the place on the data-parallel mesh, not the rank, and starts anew for every parameter,
    because what comes before it in the group may be cut differently.
    """

    source: Stochastic
    seed: int
    place: tuple[int, ...]
    """On the data-parallel mesh."""
    state: ReductionState

    def begin(self, hop: str, index: int) -> None:
        """Start the noise of one parameter."""
        state = self.state
        self.source.seed(self.seed, state.group, self.place, state.calls, hop, index)


@dataclass(frozen=True)
class _Compensation:
    """Error feedback of one group."""

    residuals: Residuals
    workspace: Workspace


class BoundReduce(BoundReduceCodec):
    """Encodes, sums and decodes the gradients of one group."""

    def __init__(
        self,
        plan: Payload,
        settings: GradientSettings,
        workspace: Workspace,
        state: ReductionState,
        group: GroupInfo,
    ) -> None:
        """``state`` outlives this object: it is what a checkpoint holds."""
        self.payload_bytes = plan.nbytes
        self.replicas: BoundReplicas | None = None
        self._plan = plan
        self._settings = settings
        self._state = state
        rounding: Rounding = Nearest()
        self._noise: _Noise | None = None
        if settings.rounding == "stochastic":
            rounding = source = Stochastic(workspace, group.device)
            self._noise = _Noise(source, settings.seed, _place(group), state)
        self._codec = BlockCodec(plan.format, workspace, rounding)
        self._summation = Summation(self._codec, workspace)
        self._present: frozenset[int] | None = None
        self._compensation: _Compensation | None = None
        if state.residuals is not None:
            self._compensation = _Compensation(state.residuals, workspace)

    def with_replicas(self, workspace: Workspace) -> BoundReduce:
        """The same codec, quantizing the sums between replicas too."""
        self.replicas = BoundReplicas(self._plan, self._codec, workspace, self._noise)
        return self

    @override
    def begin(self, present: frozenset[int]) -> None:
        self._present = present

    def _compensation_of(self, index: int) -> _Compensation | None:
        """Errors of a parameter without a gradient stay: what they would add is not kept."""
        if self._present is not None and index not in self._present:
            return None
        return self._compensation

    @override
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        state = self._state
        if self._compensation is not None:
            self._compensation.residuals.prepare(
                self._plan, payloads.shape[0], state.calls, payloads.device
            )
        parts = Parts(payloads, self._plan)
        limit = chunk_elements(payloads.device)
        for quantized in self._plan.quantized:
            if self._noise is not None:
                self._noise.begin("shards", quantized.index)
            rows = rows_of(chunks[quantized.index])
            compensation = self._compensation_of(quantized.index)
            for tile in quantized.tiles:
                if compensation is None:
                    for piece in pieces(rows, parts, tile, limit):
                        self._codec.encode(piece.values, piece.codes, piece.scales)
                else:
                    residual = compensation.residuals.values[quantized.index]
                    mine = pieces(residual, parts, tile, limit)
                    theirs = pieces(rows, parts, tile, limit)
                    for piece, error in zip(theirs, mine, strict=True):
                        self._encode_compensated(piece, error.values, compensation)
        raw = self._plan.raw
        if raw:
            targets = [parts.raw_rows(r) for r in raw]
            torch._foreach_copy_(targets, [chunks[r.index] for r in raw])
        state.calls += 1

    def _encode_compensated(self, piece: Piece, error: Tensor, own: _Compensation) -> None:
        take, values = own.workspace.take, piece.values
        wanted = take("wanted", values.shape, torch.float32, values.device)
        torch.add(error, values, out=wanted)
        self._codec.encode(wanted, piece.codes, piece.scales)
        sent = take("decoded", values.shape, torch.float32, values.device)
        self._codec.decode(piece.codes, piece.scales, sent)
        own.residuals.keep(error, wanted, sent)

    @override
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        parts = Parts(payloads, self._plan)
        for quantized in self._plan.quantized:
            self._summation.add(outs[quantized.index], parts, quantized.tiles)
        raw = self._plan.raw
        add_rows([outs[r.index] for r in raw], [parts.raw_rows(r) for r in raw])


def _place(group: GroupInfo) -> tuple[int, ...]:
    """This rank's coordinate on the data-parallel mesh of ``group``."""
    mesh: Any = group.mesh  # None in tests of plans, where there are no processes
    return () if mesh is None else tuple(mesh.get_coordinate() or ())


def replicas_of(group: GroupInfo) -> int:
    """How many replicas of each shard the group's mesh holds."""
    mesh: Any = group.mesh  # None in tests of plans, where there are no processes
    return 1 if mesh is None else mesh.size() // group.world_size


class QuantizedReduce(ReduceCodec):
    """The reduce codec of one group; what it decided is in :attr:`report`."""

    name = "quantized"

    def __init__(
        self, settings: GradientSettings, exclusions: Exclusions, workspace: Workspace
    ) -> None:
        """``workspace`` is shared by all codecs of the plugin."""
        feedback = settings.error_feedback
        self.format = settings.format
        self.settings: str = (
            f"gradients {settings.format}, rounding {settings.rounding}, seed {settings.seed}, "
            f"{feedback}, hierarchical {settings.hierarchical}, {exclusions}"
        )
        self.report: TransferReport | None = None
        self.state = ReductionState(Residuals(feedback) if feedback is not None else None)
        self._settings = settings
        self._exclusions = exclusions
        self._workspace = workspace

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        return () if self.report is None else self.report.notices("reduce")

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduce | None:
        """Decide for each trainable parameter; frozen ones do not travel."""
        frozen = frozenset(i for i, p in enumerate(group.parameters) if not p.requires_grad)
        coverage = Coverage.of(group, layout, self.format, self._exclusions, frozen)
        plan = coverage.payload(layout, group.reduce_dtype)
        self.report = reduce_report(group, layout, coverage, plan)
        self.state.belong_to(group)
        self.state.plan = plan
        if plan is None:
            return None
        bound = BoundReduce(plan, self._settings, self._workspace, self.state, group)
        replicas = replicas_of(group)
        if replicas == 1:
            return bound
        # Every replica sends its payload to all others; a native all-reduce sends the sums about
        # twice, whatever the number of replicas.
        native = 2 * layout.shard_numel * group.reduce_dtype.itemsize
        pays = self._settings.hierarchical and plan.nbytes * replicas < native
        if not pays:
            return bound
        self.report = replace(self.report, replica_bytes=(replicas - 1) * plan.nbytes)
        return bound.with_replicas(self._workspace)
