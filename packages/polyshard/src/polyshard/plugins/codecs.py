"""What travels: codecs of all-gathers and of reductions."""

# ruff: noqa: B027  (an empty method is a default)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from polyshard.plugins.base import Named
from polyshard.plugins.info import GroupInfo

if TYPE_CHECKING:
    from polyshard.sharding.layout import GroupLayout


class BoundGatherCodec(ABC):
    """An all-gather codec bound to one group."""

    payload_bytes: int
    """Bytes every rank sends to each peer; equal on all ranks."""

    keeps_payload: bool = False
    """Have the engine keep this rank's payload between gathers, and call :meth:`encode` only after
    the shard changed."""

    @abstractmethod
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, original dtype) into ``payload`` (uint8)."""

    @abstractmethod
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        """Fill each parameter's ``[W, chunk_numel]`` region (param dtype) from all payloads.

        ``payloads`` is ``[W, payload_bytes]`` uint8 in rank order. A region may be a strided view.
        The owner's own chunk is decoded too: every rank must compute with the same values.
        """


class GatherCodec(Named, ABC):
    """Turns a shard into what travels in the all-gather, and back. Exclusive per group."""

    @abstractmethod
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        """Prepare for one group; ``None`` leaves it to the engine's native transfer."""


class BoundReplicaCodec(ABC):
    """Sums over the replicate axis, as the second hop of a reduction."""

    payload_bytes: int
    """Bytes every replica sends to each other one; equal on all ranks."""

    @abstractmethod
    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Write the sum over the shard axis (``[shard_numel]``, reduce dtype) into ``payload``."""

    @abstractmethod
    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        """Overwrite ``total`` with the sum of all replicas' ``payloads`` (``[R, bytes]``)."""


class BoundReduceCodec(ABC):
    """A reduce-scatter codec bound to one group."""

    payload_bytes: int
    """Bytes sent to each peer; equal on all ranks."""

    replicas: BoundReplicaCodec | None = None
    """Owns how sums travel between replicas, on a mesh that has some; ``None`` leaves it to the
    engine."""

    divisor: float | None = None
    """What the engine divides sums by, unless ``set_gradient_divide_factor`` says; ``None``: the
    number of ranks. For a codec whose sums are not of one gradient from each rank."""

    sums_in_tree: bool = False
    """Whether :meth:`decode_sum` gives, to the last bit, sums of unchanged gradients in the reduce
    dtype over a binary tree of the ranks, ``(g0 + g1) + (g2 + g3)``. Where the transport can make
    the same sums it does, and :meth:`encode` and :meth:`decode_sum` are not called."""

    kept_bytes: int = 0
    """Memory that sums which :meth:`keep` keeps take at most; equal on all ranks."""

    def begin(self, present: frozenset[int]) -> None:
        """A reduction starts: these parameters have a gradient, by index, the same on all ranks.

        Called before :meth:`encode`. For a codec that keeps something of a gradient for the next
        reduction: what is sent for other parameters reaches no ``.grad``.
        """

    @abstractmethod
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        """Write each parameter's ``[W, chunk_numel]`` gradient chunks into ``[W, bytes]`` uint8.

        Chunks are in the reduce dtype, zero where a parameter got no gradient. They may be the
        memory autograd wrote, or one zero expanded: read them only.
        """

    @abstractmethod
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        """Sum the ``W`` received payloads into each ``[chunk_numel]`` out (reduce dtype).

        ``payloads[r]`` came from rank ``r``. Sum in rank order, so that results are deterministic.
        Averaging is the engine's: return plain sums.
        """

    def keep(self, total: Tensor) -> Tensor | None:
        """The sum of one backward over the shard axis (``[shard_numel]``, reduce dtype), undivided.

        Return it, or another in its place; ``None`` keeps it from ``.grad`` for now: whoever keeps
        ``total`` may change it, and gives the sum of all that was kept after a later backward.
        """
        return total


class ReduceCodec(Named, ABC):
    """Owns how gradients travel and are summed. Exclusive per group."""

    @abstractmethod
    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        """Prepare for one group; ``None`` leaves it to the engine's native reduction.

        Called again when parameters were frozen or unfrozen: ``requires_grad`` of a parameter says
        whether a gradient of it may come.
        """
