"""What a step computes: activations, arithmetic and the model's own collectives, unit by unit.

The model runs forward and backward on the meta device. Units that are alike (class, shapes of
parameters and inputs) run once: the others hand out shapes like those of the first.

In the autograd graph around units one node stands for each. It hands out shapes in forward and
gradients in backward when a unit would, so that what lies between units is computed in its order,
beside no more memory than in a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from typing_extensions import override

from polyshard_cli.plan._torch_private import storage_key
from polyshard_cli.plan.dry_run.recorder import (
    Account,
    FlashAttention,
    Kernel,
    Recorder,
    leaves_of,
    local_of,
)
from polyshard_cli.plan.dry_run.units import Units


class _Unit(torch.autograd.Function):
    """Outputs and gradients of a unit, whose cost was booked elsewhere."""

    @staticmethod
    @override
    def forward(
        ctx: Any, recorder: Recorder, likes: Sequence[Tensor], anchor: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        del anchor
        ctx.recorder = recorder
        with recorder.on(Account()):
            ctx.templates = list(map(without_memory, given))
            made = tuple(map(torch.empty_like, likes))
        pairs = zip(likes, made, strict=True)
        ctx.mark_non_differentiable(*(new for like, new in pairs if not like.requires_grad))
        return made

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        with ctx.recorder.on(Account()):
            return None, None, None, *map(torch.empty_like, ctx.templates)


def stand_in(recorder: Recorder, given: Sequence[Tensor], out: Any) -> Any:
    """What a unit returns that is like ``out``.

    Args:
        recorder: whose accounts are spared.
        given: its inputs that ask for gradients.
        out: the tree of tensors that such a unit returned before.
    """
    leaves, spec = tree_flatten(out)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    likes = [leaves[index] for index in places]
    anchor = torch.empty((), device="cpu", requires_grad=any(like.requires_grad for like in likes))
    made = _Unit.apply(recorder, likes, anchor, *given)  # type: ignore[no-untyped-call]
    for index, tensor in zip(places, made, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, spec)


def without_memory(tensor: Tensor) -> Tensor:
    """One of the same shape and dtype, all of whose elements are one."""
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            without_memory(tensor.to_local()),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.new_empty(()).expand(tensor.shape)


def leaves_behind(node: Any) -> set[int]:
    """Leaves, by ``id``, that gradients of what ``node`` made reach without passing a unit."""
    found: set[Any] = set()
    leaves: set[int] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        elif node is not None and node not in found and not _is_unit(node):
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return leaves


def _is_unit(node: Any) -> bool:
    return isinstance(node, _Unit._backward_cls)


@dataclass(frozen=True)
class Cost:
    """One unit's forward and backward on one rank, in bytes and operations."""

    saved_bytes: int = 0
    """Activations that autograd keeps from forward to backward."""
    input_bytes: int = 0
    """Activations that it is given."""
    has_backward: bool = True
    """Whether gradients reach it: those of its parameters, or of what it is given."""
    forward: Account = field(default_factory=Account)
    backward: Account = field(default_factory=Account)


Member = tuple[str, int]
"""A module of a unit: the unit's name, and which of them."""


@dataclass(frozen=True)
class Probe:
    """Costs of all units by name, in the order they run, and of what the root does around them."""

    units: Mapping[str, Cost]
    root: Cost
    tail_gradient_bytes: int = 0
    """Of the root's parameters behind the last unit: they are there before all others."""
    problem: str = ""
    """Why nothing is known, if the model did not run."""


def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Have ``model`` compute in ``dtype``; before tensor parallelism, which keeps what it finds."""
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def probe(model: nn.Module, units: Units, inputs: Any) -> Probe:
    """Run ``model`` (meta device, not sharded) once on ``inputs``.

    Args:
        model: is changed: units hand out recorded shapes.
        units: the modules of each, by name.
        inputs: a tensor, a tuple of them, or a mapping of keyword arguments.
    """
    run = _Run(model)
    members = {(name, i): m for name, unit in units.items() for i, m in enumerate(unit)}
    for key, member in members.items():
        run.wrap(key, member)
    try:
        return run(inputs)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Probe({}, Cost(), problem=f"{type(error).__name__}: {first}")


def in_one_unit(costs: Sequence[Cost], gradient_bytes: Sequence[int]) -> Cost:
    """The cost of modules that run one after the other and are one unit.

    Args:
        costs: of each, in the order of their forwards.
        gradient_bytes: of each one's parameters; all wait for the backward of the first.
    """
    if len(costs) == 1:
        return costs[0]
    peak = kept = 0
    for cost in costs:
        peak = max(peak, kept + cost.input_bytes + cost.forward.peak_bytes)
        kept += cost.saved_bytes
    forward = _in_turn([cost.forward for cost in costs], peak - costs[0].input_bytes)
    peak = grown = 0
    for cost, gradients in zip(reversed(costs), reversed(gradient_bytes), strict=True):
        peak = max(peak, grown + cost.backward.peak_bytes)
        grown += gradients - cost.saved_bytes
    backward = _in_turn([cost.backward for cost in reversed(costs)], peak)
    has_backward = any(cost.has_backward for cost in costs)
    return Cost(kept, costs[0].input_bytes, has_backward, forward, backward)


def _in_turn(accounts: Sequence[Account], peak_bytes: int) -> Account:
    kernels: Counter[Kernel] = Counter()
    for account in accounts:
        kernels.update(account.kernels)
    collectives = [c for account in accounts for c in account.collectives]
    divided = sum(account.divided for account in accounts)
    return Account(kernels, peak_bytes, collectives, divided)


class _Run:
    """One forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recorder = Recorder()
        self._still = {storage_key(local_of(t)) for t in _resting(model)}
        self._recorder.know(_resting(model))
        self._known: dict[object, tuple[Cost, Any]] = {}
        self._costs: dict[Member, Cost] = {}
        self._gradients: dict[Member, int] = {}
        self._nodes: set[Any] = set()
        self._pending: dict[GradientEdge, Tensor] = {}

    def wrap(self, member: Member, unit: nn.Module) -> None:
        """Have ``unit`` be measured, or be told apart from none."""
        original = unit.forward
        self._gradients[member] = sum(
            local_of(p).nbytes for p in unit.parameters() if p.requires_grad
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (type(unit), _shapes(unit.named_parameters()), _signature((args, kwargs)))
            given = [t for t in leaves_of((args, kwargs)) if t.requires_grad]
            self._nodes.update(t.grad_fn for t in given)
            if key not in self._known:
                self._known[key] = self._measure(unit, original, args, kwargs)
            self._costs[member], out = self._known[key]
            if _is_pending(out):
                del self._known[key]  # what it waits for is its own
                self._pending.update(map(self._gap, given))
                return out
            return stand_in(self._recorder, given, out)

        unit.forward = forward

    def __call__(self, inputs: Any) -> Probe:
        """Run the model: units on accounts of their own, the rest on the root's."""
        forward, backward = Account(), Account()
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (_tuple(inputs), {})
        self._recorder.know(leaves_of(inputs))
        with self._recorder, FlashAttention(self._recorder), torch.enable_grad():
            with self._recorder.on(forward), self._saving() as saved:
                loss = _loss(self._model(*args, **kwargs))
            tail = self._tail_bytes(loss)
            with self._recorder.on(backward):
                ends: Any = [loss, *self._pending]
                torch.autograd.backward(
                    ends, [None, *map(torch.empty_like, self._pending.values())]
                )
        root = Cost(_total(saved, self._still), 0, True, forward, backward)
        return Probe(self._units(), root, tail)

    def _tail_bytes(self, loss: Tensor) -> int:
        """Of parameters whose gradients are complete before any unit's backward."""
        behind = leaves_behind(loss.grad_fn) - set().union(*map(leaves_behind, self._nodes))
        parameters = {id(p): p for p in self._model.parameters()}
        return sum(local_of(p).nbytes for key, p in parameters.items() if key in behind)

    def _gap(self, given: Tensor) -> tuple[GradientEdge, Tensor]:
        """Where the gradient of a unit's input goes, and one of its shape."""
        return get_gradient_edge(given), without_memory(given)

    def _units(self) -> dict[str, Cost]:
        found: dict[str, list[Member]] = {}
        for member in self._costs:
            found.setdefault(member[0], []).append(member)
        return {
            name: in_one_unit(
                [self._costs[member] for member in members],
                [self._gradients[member] for member in members],
            )
            for name, members in found.items()
        }

    def _measure(
        self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Cost, Any]:
        args, kwargs = tree_map_only(Tensor, _leaf, (args, kwargs))
        # What units are given beside activations (masks, positions) is the same for all.
        shared = {_storage(t) for t in leaves_of((args, kwargs)) if not t.requires_grad}
        forward, backward = Account(), Account()
        with self._recorder.on(forward), self._saving() as saved:
            out = call(*args, **kwargs)
        total = _total(saved, self._still | shared)
        given = sum(local_of(t).nbytes for t in leaves_of((args, kwargs)) if t.requires_grad)
        if _is_pending(out):
            return Cost(total, given, True, forward, backward), out
        saved.clear()
        wanted = [t for t in leaves_of(out) if t.requires_grad]
        with self._recorder.on(backward):
            if wanted:
                torch.autograd.backward(wanted, [torch.empty_like(t) for t in wanted])
        for parameter in unit.parameters():
            parameter.grad = None
        result = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), out)
        return Cost(total, given, bool(wanted), forward, backward), result

    @contextmanager
    def _saving(self) -> Iterator[dict[int, int]]:
        """Bytes of what autograd saves, by storage."""
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            local = local_of(tensor.detach())
            saved[_storage(local)] = local.untyped_storage().nbytes()
            return tensor

        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            yield saved


def _resting(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _is_pending(out: Any) -> bool:
    """Whether ranks have yet to add up what they computed, as a divided embedding leaves it.

    Only the tensor itself can be added up; then its backward is booked on the root.
    """
    return any(
        isinstance(t, DTensor) and any(map(_is_partial, t.placements)) for t in leaves_of(out)
    )


def _is_partial(placement: Placement) -> bool:
    return placement.is_partial()


def _storage(tensor: Tensor) -> int:
    return storage_key(local_of(tensor.detach()))


def _total(saved: Mapping[int, int], still: set[int]) -> int:
    return sum(nbytes for storage, nbytes in saved.items() if storage not in still)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _shapes(named: Iterator[tuple[str, nn.Parameter]]) -> tuple[object, ...]:
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named)


def _signature(tree: Any) -> tuple[object, ...]:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in leaves_of(tree))


def _tuple(inputs: Any) -> Sequence[Any]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _loss(out: Any) -> Tensor:
    """Cross entropy in float32 of logits ``[..., vocabulary]``; of a scalar, itself."""
    found = getattr(out, "logits", out)
    first = leaves_of(found)[0]
    if first.ndim == 0:
        return first
    rows = first.flatten(0, -2).float()
    target = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    return F.cross_entropy(rows, target)
