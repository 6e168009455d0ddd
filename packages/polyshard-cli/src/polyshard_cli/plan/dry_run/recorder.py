"""Watches operations on the meta device: memory alive, arithmetic, collectives.

Nothing is computed, so a step of any size takes milliseconds. An *account* is what one part of a
step costs; operations are booked on the one in use.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from polyshard_cli.plan._torch_private import is_fake, ranks_of_group

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """One that the model's own operations start: its kind, its ranks, bytes of its input."""

    kind: str
    ranks: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sends where ranks pass parts around a ring."""
        others = self.ranks - 1
        if self.kind == "all-reduce":
            return math.ceil(2 * others * self.payload_bytes / self.ranks)
        if self.kind == "all-gather":
            return others * self.payload_bytes
        return math.ceil(others * self.payload_bytes / self.ranks)


@dataclass(frozen=True)
class Kernel:
    """One operation that computes or moves something."""

    flops: int
    """Multiplications and additions of a matrix product, as torch's flop counter counts them."""
    touched_bytes: int
    """Bytes that it reads and writes."""


@dataclass
class Account:
    """What one part of a step costs on one rank."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    """How many there are that cost the same: all operations but views."""
    peak_bytes: int = 0
    """Most memory alive at once, of what was allocated since the account was opened."""
    collectives: list[Collective] = field(default_factory=list)
    divided: int = 0
    """Operations on ``DTensor``s, each of which is others on their parts."""


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Recorder(TorchDispatchMode):
    """Books every operation on the account in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account: Account | None = None
        self._alive = 0
        self._base = 0
        self._known: dict[int, int] = {}

    @contextmanager
    def on(self, account: Account) -> Iterator[Account]:
        """Book on ``account``; another may be opened inside, and books for itself alone."""
        before, self._account = self._account, account
        base, self._base = self._base, self._alive
        try:
            yield account
        finally:
            self._account, self._base = before, base

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Memory that was there before, which counts for nobody."""
        for tensor in tensors:
            self._note(local_of(tensor), counts=False)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, products: int) -> None:
        """Book attention that never holds its scores: so many products of ``T x S`` each."""
        if self._account is not None:
            *outer, length, width = query.shape
            size = math.prod(outer) * length * key.shape[-2] * (width + value.shape[-1])
            self._account.kernels[Kernel(products * size, 0)] += 1

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            if self._account is not None:
                self._account.divided += 1
            return NotImplemented  # to see what it does with local tensors
        out = func(*args, **(kwargs or {}))
        if any(map(is_fake, _tensors(out))):
            return out  # of whole tensors, where `DTensor` looks up how an operation divides them
        if self._account is not None:
            self._book(self._account, func, args, kwargs or {}, out)
        for tensor in _tensors(out):
            self._note(tensor)
        if self._account is not None:
            alive = self._alive - self._base
            self._account.peak_bytes = max(self._account.peak_bytes, alive)
        return out

    def _book(self, account: Account, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        if not func.is_view:
            touched = sum(t.nbytes for t in _tensors((args, out)))
            account.kernels[Kernel(flops, touched)] += 1
        kind = KINDS.get(func._overloadpacket.__name__)
        if kind is not None and func.namespace == "_c10d_functional":
            account.collectives.append(Collective(kind, ranks_of_group(args[-1]), args[0].nbytes))

    def _note(self, tensor: Tensor, *, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        nbytes = storage.nbytes() if counts else 0
        self._known[key] = nbytes
        self._alive += nbytes
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._alive -= self._known.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> list[Tensor]:
    """Tensors anywhere in arguments or outputs."""
    return _tensors(tree)


class _Attention(torch.autograd.Function):
    """Attention as accelerators do it: memory for its inputs, its output and a row of sums.

    On the meta device torch would decompose it into products that hold all scores.
    """

    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, recorder: Recorder) -> Tensor:
        recorder.attention(query, key, value, 2)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.recorder = recorder
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.recorder.attention(query, key, value, 5)
        made = [torch.empty_like(t) for t in (query, key, value)]
        return *made, None


class FlashAttention(TorchFunctionMode):
    """Has ``scaled_dot_product_attention`` be booked on ``recorder`` instead."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        inputs = (given["query"], given["key"], given["value"])
        return _Attention.apply(*inputs, self._recorder)  # type: ignore[no-untyped-call]
