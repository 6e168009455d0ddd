"""The all-gather codec: one payload per group and rank, decoded straight into the regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from polyshard.plugins.seams import BoundGatherCodec, GatherCodec, GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard_quantized.arithmetic.codec import BlockCodec, Nearest
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.layout.exclusions import Exclusions
from polyshard_quantized.layout.payload import Payload
from polyshard_quantized.layout.tensors import Parts, Piece, pieces
from polyshard_quantized.report import Coverage, TransferReport, gather_report
from polyshard_quantized.workspace import Workspace, chunk_elements


class ShardEncoder:
    """Writes a flat ``[shard_numel]`` tensor as a payload. Views are made once per pair of tensors.

    Holding the tensors of the last call costs nothing: the engine keeps them for as long, and frees
    their memory, not their storage.
    """

    def __init__(self, plan: Payload, codec: BlockCodec) -> None:
        """``codec`` does the arithmetic of ``plan``'s format."""
        self._plan = plan
        self._codec = codec
        self._seen: tuple[Tensor, Tensor] | None = None
        self._pieces: list[Piece] = []
        self._raw: tuple[list[Tensor], list[Tensor]] = ([], [])

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        """Fill ``payload`` (``[nbytes]`` ``uint8``); gaps between parts keep what they hold."""
        if self._seen is None or self._seen[0] is not shard or self._seen[1] is not payload:
            with torch.inference_mode(mode=False):  # these views outlive an evaluation
                self._bind(shard, payload)
            self._seen = (shard, payload)
        for piece in self._pieces:
            self._codec.encode(piece.values, piece.codes, piece.scales)
        targets, sources = self._raw
        if targets:
            torch._foreach_copy_(targets, sources)

    def _bind(self, shard: Tensor, payload: Tensor) -> None:
        plan = self._plan
        flat, parts = shard[None], Parts(payload[None], plan)
        limit = chunk_elements(shard.device)
        self._pieces = [p for t in plan.shard_tiles for p in pieces(flat, parts, t, limit)]
        self._raw = (
            [parts.raw_rows(r)[0] for r in plan.raw],
            [shard[r.shard_offset : r.shard_offset + r.numel] for r in plan.raw],
        )


class BoundGather(BoundGatherCodec):
    """Encodes and decodes the parameters of one group."""

    keeps_payload = True

    def __init__(self, plan: Payload, workspace: Workspace) -> None:
        self.payload_bytes = plan.nbytes
        self._plan = plan
        self._codec = BlockCodec(plan.format, workspace, Nearest())
        self._encoder = ShardEncoder(plan, self._codec)
        self._seen: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self._pieces: list[Piece] = []
        self._raw: tuple[list[Tensor], list[Tensor]] = ([], [])

    @override
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self._encoder.encode(shard, payload)

    @override
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        if not self._is_bound(payloads, regions):
            with torch.inference_mode(mode=False):  # these views outlive an evaluation
                self._bind(payloads, regions)
            self._seen = (payloads, tuple(regions))
        for piece in self._pieces:
            self._codec.decode(piece.codes, piece.scales, piece.values)
        targets, sources = self._raw
        if targets:
            torch._foreach_copy_(targets, sources)

    def _is_bound(self, payloads: Tensor, regions: Sequence[Tensor]) -> bool:
        if self._seen is None or self._seen[0] is not payloads:
            return False
        return all(a is b for a, b in zip(self._seen[1], regions, strict=True))

    def _bind(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        plan, parts = self._plan, Parts(payloads, self._plan)
        limit = chunk_elements(payloads.device)
        self._pieces = [
            piece
            for quantized in plan.quantized
            for tile in quantized.tiles
            for piece in pieces(regions[quantized.index], parts, tile, limit)
        ]
        self._raw = (
            [regions[r.index] for r in plan.raw],
            [parts.raw_rows(r) for r in plan.raw],
        )


class QuantizedGather(GatherCodec):
    """The gather codec of one group; what it decided is in :attr:`report`."""

    name = "quantized"

    def __init__(self, form: BlockFormat, exclusions: Exclusions, workspace: Workspace) -> None:
        """``workspace`` is shared by all codecs of the plugin."""
        self.format = form
        self.settings: str = f"weights {form}, {exclusions}"
        self.report: TransferReport | None = None
        self._exclusions = exclusions
        self._workspace = workspace

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        return () if self.report is None else self.report.notices("gather")

    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGather | None:
        """Decide for each parameter; a group with nothing to quantize stays native."""
        if self._exclusions.fqns and not group.identity.is_named:
            return None  # gathered by hand before the root gave names, which patterns ask for
        coverage = Coverage.of(group, layout, self.format, self._exclusions)
        smaller = group.param_dtype.itemsize <= group.orig_dtype.itemsize
        raw_dtype = group.param_dtype if smaller else group.orig_dtype
        plan = coverage.payload(layout, raw_dtype)
        self.report = gather_report(group, layout, coverage, plan)
        return None if plan is None else BoundGather(plan, self._workspace)
