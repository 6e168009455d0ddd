"""Plugins for tests: every seam taken by something whose result is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyshard import Plugin, hookimpl
from polyshard.plugins.builtin import DefaultBackend, DeviceStorage
from polyshard.seams import GroupInfo, ParamInfo
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport


class BytesGather:
    """Ships each parameter's chunk as raw fp32 bytes: exact, one payload."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.payload_bytes = 4 * sum(p.chunk_numel for p in layout.parameters)

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        parts = [
            shard[p.shard_offset : p.shard_offset + p.chunk_numel] for p in self.layout.parameters
        ]
        payload.copy_(torch.cat(parts).float().view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for placed, region in zip(self.layout.parameters, regions, strict=True):
            region.copy_(values[:, start : start + placed.chunk_numel])
            start += placed.chunk_numel


class BytesReduce:
    """Ships gradients as raw fp32 bytes and sums them in rank order."""

    def __init__(self, layout: GroupLayout) -> None:
        self.payload_bytes = 4 * sum(p.chunk_numel for p in layout.parameters)

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        payloads.copy_(torch.cat(list(chunks), dim=1).float().view(torch.uint8))

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        start = 0
        for out in outs:
            out.copy_(values[:, start : start + out.numel()].sum(0))
            start += out.numel()


class GatherFactory:
    name = "bytes"
    settings = "fp32"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesGather:
        return BytesGather(layout)


class ReduceFactory:
    name = "bytes"
    settings = "fp32"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BytesReduce:
        return BytesReduce(layout)


class Codecs(Plugin):
    """Claims both codecs."""

    name = "codecs"
    version = "1.2"

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory:
        return GatherFactory()

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceFactory:
        return ReduceFactory()


class OtherCodec(Plugin):
    """Claims the gather codec of groups whose name holds ``only``."""

    name = "other"
    version = "3"

    def __init__(self, only: str = "") -> None:
        self.only = only

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory | None:
        return GatherFactory() if self.only in group.name else None


class Away(DeviceStorage):
    """Keeps the shard elsewhere and brings it to a buffer of its own for each gather."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches = 0

    def rest(self, shard: Tensor) -> Tensor:
        self._view = torch.full_like(shard, float("nan"))
        return super().rest(shard)

    def view(self) -> Tensor:
        return self._view

    def fetch(self) -> None:
        self.fetches += 1
        self._view.copy_(super().view())

    def release(self) -> None:
        self._view.fill_(float("nan"))


class AwayFactory:
    name = "away"
    settings = ""

    def create(self, group: GroupInfo, layout: GroupLayout) -> Away:
        return Away()


class SlowBackend(DefaultBackend):
    """The default transport under another name."""

    name = "slow"

    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        transport = super().connect(roles, device)
        transport.name = "slow"
        return transport


class Resting(Plugin):
    """Claims the storage and the collectives."""

    name = "resting"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> AwayFactory:
        return AwayFactory()

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> SlowBackend:
        return SlowBackend()


@dataclass(frozen=True)
class Blocks:
    """Keeps blocks of so many elements on one rank."""

    elements: int
    name: str = "blocks"
    settings: str = ""

    def block_elements(self, param: ParamInfo) -> int:
        return self.elements


@dataclass(frozen=True, eq=False)
class Constrained(Plugin):
    """Contributes a sharding constraint."""

    elements: int
    name = "constrained"

    @hookimpl
    def polyshard_sharding_constraint(self, group: GroupInfo) -> Blocks:
        return Blocks(self.elements)


class Signing(Plugin):
    """Says the sum of every parameter."""

    name = "signing"

    @hookimpl
    def polyshard_parameter_facts(self, tensor: Tensor, param: ParamInfo) -> str | None:
        return f"sum {float(tensor.sum())}" if param.requires_grad else None


class Watcher:
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"unshard {group} {payload_bytes}")

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"unsharded {group}")

    def on_reshard(self, group: str) -> None:
        self.events.append(f"reshard {group}")

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"reduce {group} {payload_bytes}")

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"reduced {group}")

    def on_step_end(self) -> None:
        self.events.append("step end")


class Watching(Plugin):
    """Contributes an observer."""

    name = "watching"

    def __init__(self) -> None:
        self.watcher = Watcher()

    @hookimpl
    def polyshard_observer(self) -> Watcher:
        return self.watcher


class Flattening(Plugin):
    """Shards each matrix as a flat vector: a view, so that it can be undone without a copy."""

    name = "flattening"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.reshape(-1), tensor.shape) if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.view(param_extension)


class Transposing(Plugin):
    """Shards each matrix transposed. Comes before or after ``flattening`` as told."""

    name = "transposing"

    def __init__(self, before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
        self.before = before  # type: ignore[misc]
        self.after = after  # type: ignore[misc]
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any]:
        if tensor.ndim < 2:
            return tensor, None
        name = param.fqn if param is not None else "?"  # FSDP1 does not say
        self.seen.append((name, tuple(tensor.shape)))
        return tensor.transpose(0, -1), "transposed"

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        assert param_extension == "transposed"
        return tensor.transpose(0, -1)


class Unsqueezing(Plugin):
    """Shards each matrix with one more dim at the end."""

    name = "unsqueezing"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.unsqueeze(-1), tensor.ndim) if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        assert tensor.ndim == param_extension + 1
        return tensor.squeeze(-1)


class Preparing(Plugin):
    """Adds a marker to every module before it is sharded."""

    name = "preparing"

    @hookimpl
    def polyshard_prepare_model(self, module: nn.Module) -> None:
        module.prepared = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Negating:
    """Stores values with the other sign."""

    name: str = "negating"
    settings: str = ""
    seen: list[str] = field(default_factory=list)

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        self.seen.append(param.fqn)
        return -value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return -value


class Adapting(Plugin):
    """Contributes a state-dict adapter."""

    name = "adapting"

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Negating:
        return Negating()


class KeptGather(BytesGather):
    """Counts how often it is asked to encode."""

    keeps_payload = True

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.encoded = 0

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        self.encoded += 1
        super().encode(shard, payload)


class KeptFactory:
    name = "kept"
    settings = ""

    def __init__(self) -> None:
        self.bound: list[KeptGather] = []
        self.notices = ("kept: nothing to say",)

    def bind(self, group: GroupInfo, layout: GroupLayout) -> KeptGather:
        self.bound.append(KeptGather(layout))
        return self.bound[-1]


class Keeping(Plugin):
    """Keeps payloads while the shard stays the same."""

    name = "keeping"

    def __init__(self) -> None:
        self.factory = KeptFactory()

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> KeptFactory:
        return self.factory


class Doubling:
    """Sums replicas exactly, and doubles the sum so that its use shows."""

    def __init__(self, layout: GroupLayout) -> None:
        self.payload_bytes = 4 * layout.shard_numel

    def encode(self, total: Tensor, payload: Tensor) -> None:
        payload.copy_(total.view(torch.uint8))

    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        total.copy_(payloads.view(torch.float32).sum(0) * 2)


class TwoHops(BytesReduce):
    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.replicas = Doubling(layout)


class TwoHopFactory:
    name = "two hops"
    settings = ""

    def __init__(self) -> None:
        self.trainable: list[int] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> TwoHops:
        self.trainable.append(sum(p.requires_grad for p in group.parameters))
        return TwoHops(layout)


class TwoHopReduction(Plugin):
    """Owns both hops of a reduction."""

    name = "two_hops"

    def __init__(self) -> None:
        self.factory = TwoHopFactory()

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> TwoHopFactory:
        return self.factory


class Names(Plugin):
    """Remembers the names its gather codec was bound with."""

    name = "names"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Names:
        return self

    @property
    def settings(self) -> str:
        return ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> None:
        self.seen.append(tuple(p.fqn for p in group.parameters))
