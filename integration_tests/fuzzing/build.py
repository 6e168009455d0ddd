"""Modules, meshes, plugins and optimizers from data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fuzzing.case import Case, Leaf, Policy, Tree, Unit

Flow = tuple[Tensor, Tensor, int]
"""What modules pass on: values ``[batch, length, width]``, indices, number of the micro-batch."""

ROWS = 7
"""Rows of an index: every table is indexed modulo its own size."""


class Used(nn.Module):
    """Runs ``change`` in the micro-batches it is used in; adds what it returns to the values."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.used = leaf.used

    def forward(self, flow: Flow) -> Flow:
        x, index, micro = flow
        if self.used == "never" or (self.used == "even" and micro % 2):
            return flow
        change = self.change(x, index)
        # Bounded, so that no depth amplifies a difference of rounding.
        return x + 0.5 * torch.tanh(change).to(x.dtype), index, micro

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError


class Mlp(Used):
    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        self.up = nn.Linear(width, leaf.size, dtype=dtype_of(leaf, 0))
        self.down = nn.Linear(leaf.size, width, bias=False, dtype=dtype_of(leaf, 1))

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        out: Tensor = self.down(hidden.to(self.down.weight.dtype))
        return out


class Norm(Used):
    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        # A large epsilon: a norm of nearly equal values would amplify differences of rounding.
        self.norm = nn.LayerNorm(width, eps=1.0, dtype=dtype_of(leaf, 0))

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.norm(x.to(self.norm.weight.dtype))
        return out


class Conv(Used):
    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        self.conv = nn.Conv1d(width, width, 3, padding=1, dtype=dtype_of(leaf, 0))

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(1, 2).to(self.conv.weight.dtype))
        return out.transpose(1, 2)


class Table(Used):
    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        self.table = nn.Embedding(max(leaf.size, 1), width, dtype=dtype_of(leaf, 0))

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.table(index % self.table.num_embeddings)
        return out


class Tied(Used):
    """A table that is also the head, and a buffer."""

    scale: Tensor
    offset: Tensor

    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        dtype = dtype_of(leaf, 0)
        self.table = nn.Embedding(max(leaf.size, 1), width, dtype=dtype)
        self.head = nn.Linear(width, max(leaf.size, 1), bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("offset", torch.full((), 0.25), persistent=False)

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        found: Tensor = self.table(index % self.table.num_embeddings)
        logits: Tensor = self.head(x.to(self.head.weight.dtype))
        return found * self.scale + self.offset + logits.mean(-1, keepdim=True)


class Raw(Used):
    """Parameters of any shape; integers among them are frozen. Each gives a number."""

    def __init__(self, leaf: Leaf, width: int) -> None:
        super().__init__(leaf)
        for number, shape in enumerate(leaf.shapes):
            value = torch.zeros(shape, dtype=dtype_of(leaf, number))
            floating = value.is_floating_point()
            self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=floating))

    def change(self, x: Tensor, index: Tensor) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        for parameter in self.parameters(recurse=False):
            flat = parameter.reshape(-1).float()
            total = total + (flat * torch.arange(1, flat.numel() + 1).cos()).sum()
        return x.float() * total


class Recompute(nn.Sequential):
    """A sequence under activation checkpointing."""

    reentrant = False

    def forward(self, flow: Flow) -> Flow:
        x, index, micro = flow
        if not torch.is_grad_enabled() or (self.reentrant and not x.requires_grad):
            return self._run(x, index, micro)
        out: Flow = checkpoint(self._run, x, index, micro, use_reentrant=self.reentrant)
        return out

    def _run(self, x: Tensor, index: Tensor, micro: int) -> Flow:
        flow = (x, index, micro)
        for module in self:
            flow = module(flow)
        return flow


KINDS: dict[str, Callable[[Leaf, int], Used]] = {
    "mlp": Mlp,
    "norm": Norm,
    "conv": Conv,
    "table": Table,
    "tied": Tied,
    "raw": Raw,
}


def dtype_of(leaf: Leaf, layer: int) -> torch.dtype:
    return dtype(leaf.dtypes[layer % len(leaf.dtypes)])


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def build(case: Case) -> nn.Module:
    """The model of ``case``, the same on every rank and in every process."""
    model = _module(case.tree, case.width)
    generator = torch.Generator().manual_seed(case.seed)
    for parameter in model.parameters():
        values = 0.5 * torch.randn(parameter.shape, generator=generator)
        if not parameter.is_floating_point():
            values = torch.randint(-3, 4, parameter.shape, generator=generator)
        if not parameter.is_meta:
            parameter.data.copy_(values)
    return model


def _module(node: Leaf | Tree, width: int) -> nn.Module:
    if isinstance(node, Leaf):
        leaf = KINDS[node.kind](node, width)
        for number, parameter in enumerate(leaf.parameters()):
            if node.frozen == "all" or (node.frozen == "first" and number == 0):
                parameter.requires_grad_(False)
        return leaf
    children = [_module(child, width) for child in node.children]
    if not node.checkpoint:
        return nn.Sequential(*children)
    sequence = Recompute(*children)
    sequence.reentrant = node.checkpoint == "reentrant"
    return sequence


def unit_calls(case: Case, model: nn.Module) -> Iterator[tuple[list[nn.Module], Unit]]:
    """What ``fully_shard`` is called with, in order: inner units first."""
    yield from _calls(case.tree, model)


def _calls(node: Leaf | Tree, module: nn.Module) -> Iterator[tuple[list[nn.Module], Unit]]:
    alone: list[nn.Module] = []
    if isinstance(node, Tree):
        for child, inner in zip(node.children, module.children(), strict=True):
            yield from _calls(child, inner)
            own = child.unit is not None and not (isinstance(child, Tree) and child.listed)
            if not own and any(True for _ in inner.parameters()):
                alone.append(inner)
    if node.unit is None:
        return
    if isinstance(node, Tree) and node.listed:
        if alone:
            yield alone, node.unit
    else:
        yield [module], node.unit


# How parameters are sharded. --------------------------------------------------------------------


def _last(parameter: nn.Parameter) -> Any:
    return Shard(parameter.ndim - 1) if parameter.ndim else None


def _whole(parameter: nn.Parameter) -> Any:
    return Replicate()


def _mixed(parameter: nn.Parameter) -> Any:
    choice = (parameter.numel() + parameter.ndim) % 3
    if choice == 0:
        return Replicate()
    return _last(parameter) if choice == 1 else None


PLACEMENTS: dict[str, Callable[[nn.Parameter], Any] | None] = {
    "rows": None,
    "last": _last,
    "whole": _whole,
    "mixed": _mixed,
}


def policy_of(policy: Policy) -> Any:
    from polyshard import MixedPrecisionPolicy

    def named(name: str | None) -> torch.dtype | None:
        return None if name is None else dtype(name)

    return MixedPrecisionPolicy(
        param_dtype=named(policy.param),
        reduce_dtype=named(policy.reduce),
        output_dtype=named(policy.output),
        cast_forward_inputs=policy.cast_inputs,
    )


# [Note: epsilon of Adam]
# Adam divides a gradient by its own size: with a small epsilon, gradients of rounding errors alone
# would move parameters by a whole learning rate.
EPSILON = 1e-2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, eps=EPSILON, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.05, eps=EPSILON, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, eps=EPSILON, fused=True),
}


def batch(case: Case, micro: int, data_rank: int) -> Flow:
    """Inputs of one micro-batch on one data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * micro + data_rank)
    x = torch.randn(2, 3, case.width, generator=generator)
    index = torch.randint(0, ROWS, (2, 3), generator=generator)
    return x.requires_grad_(case.input_grad), index, micro


def loss_of(out: Flow, micro: int) -> Tensor:
    """Weighs every output differently."""
    x = out[0].double()
    weights = torch.arange(x.numel(), dtype=torch.float64).add(micro).sin().view(x.shape)
    return F.mse_loss(x, weights, reduction="sum") / math.sqrt(x.numel())
