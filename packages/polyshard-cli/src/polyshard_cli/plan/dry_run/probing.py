"""What a step computes: activations, arithmetic and the model's own collectives, unit by unit.

The model runs forward and backward on the meta device. Units that are alike (what they print,
switches, shapes of parameters and inputs) run once: the others hand out shapes like those of the
first.

In the autograd graph around units one node stands for each. It hands out shapes in forward and
gradients in backward when a unit would, so that what lies between units is computed in its order,
beside no more memory than in a run.

A recorder watches operations: memory alive, arithmetic, collectives. Nothing is computed, so a step
of any size takes milliseconds. An *account* is what one part of a step costs; operations are booked
on the one in use.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from polyshard_cli.plan._torch_private import is_fake, ranks_of_group, storage_key
from polyshard_cli.plan.dry_run.units import Units

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
        """Memory that was there before, which no phase counts."""
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
        if any(map(is_fake, leaves_of(out))):
            return out  # of whole tensors, where `DTensor` looks up how an operation divides them
        for tensor in leaves_of(out):
            self._note(tensor)
        if self._account is not None:
            self._book(self._account, func, args, kwargs or {}, out)
        return out

    def _book(self, account: Account, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        account.peak_bytes = max(account.peak_bytes, self._alive - self._base)
        count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        if not func.is_view:
            touched = sum(t.nbytes for t in leaves_of((args, out)))
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


def leaves_of(tree: Any) -> list[Tensor]:
    """Tensors anywhere in arguments or outputs."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


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
    """What a unit returns that is like ``out``, which such a unit returned before.

    ``given`` are its inputs that ask for gradients; accounts of ``recorder`` are spared.
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
        elif node and node not in found and not isinstance(node, _Unit._backward_cls):
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return leaves


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


@dataclass(frozen=True)
class Probe:
    """Costs of all units by name, in the order they run, and of what the root does around them."""

    units: Mapping[str, Cost]
    root: Cost
    tail_gradient_bytes: int = 0
    """Of the root's parameters behind the last unit: they are there before all others."""
    problem: str = ""
    """Why nothing is known, if the model did not run."""


def probe(model: nn.Module, units: Units, inputs: Any) -> Probe:
    """Run ``model`` (meta device, not sharded) once on ``inputs``.

    Args:
        model: is changed: units hand out recorded shapes.
        units: the modules of each, by name.
        inputs: a tensor, a tuple of them, or a mapping of keyword arguments.
    """
    run = _Run(model)
    for name, unit in units.items():
        for place, member in enumerate(unit):
            run.wrap((name, place), member)
    try:
        return run(inputs)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Probe({}, Cost(), problem=f"{type(error).__name__}: {first}")


def in_one_unit(members: Sequence[tuple[Cost, int]]) -> Cost:
    """The cost of modules that run one after the other and are one unit.

    Args:
        members: costs in the order of their forwards, and bytes of the gradients of each one's
            parameters; all of these wait for the backward of the first.
    """
    costs = [cost for cost, _ in members]
    if len(costs) == 1:
        return costs[0]
    peak = kept = 0
    for cost in costs:
        peak = max(peak, kept + cost.input_bytes + cost.forward.peak_bytes)
        kept += cost.saved_bytes
    forward = _in_turn([cost.forward for cost in costs], peak - costs[0].input_bytes)
    peak = grown = 0
    for cost, gradients in reversed(members):
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
        resting = [*model.parameters(), *model.buffers()]
        self._still = {storage_key(local_of(t)) for t in resting}
        self._recorder.know(resting)
        self._known: dict[object, tuple[Cost, Any]] = {}
        self._costs: dict[tuple[str, int], tuple[Cost, int]] = {}
        """Of modules, by their unit's name and their place in it; and bytes of their gradients."""
        self._nodes: set[Any] = set()
        self._pending: dict[GradientEdge, Tensor] = {}

    def wrap(self, member: tuple[str, int], unit: nn.Module) -> None:
        """Have ``unit`` be measured, or be told apart from none."""
        original, kind = unit.forward, _kind(unit)
        gradients = sum(local_of(p).nbytes for p in unit.parameters() if p.requires_grad)

        def forward(*args: Any, **kwargs: Any) -> Any:
            parameters = ((name, *_shape(p)) for name, p in unit.named_parameters())
            key = (kind, tuple(parameters), *map(_shape, leaves_of((args, kwargs))))
            given = [t for t in leaves_of((args, kwargs)) if t.requires_grad]
            self._nodes.update(t.grad_fn for t in given)
            if key not in self._known:
                self._known[key] = self._measure(unit, original, args, kwargs)
            cost, out = self._known[key]
            self._costs[member] = cost, gradients
            if _is_pending(out):
                del self._known[key]  # what it waits for is its own
                # Where the gradient of a unit's input goes, and one of its shape.
                self._pending.update((get_gradient_edge(t), without_memory(t)) for t in given)
                return out
            return stand_in(self._recorder, given, out)

        unit.forward = forward

    def __call__(self, inputs: Any) -> Probe:
        """Run the model: units on accounts of their own, the rest on the root's."""
        forward, backward = Account(), Account()
        is_named = isinstance(inputs, Mapping)
        kwargs = inputs if is_named else {}
        args = () if is_named else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        self._recorder.know(leaves_of(inputs))
        with self._recorder, FlashAttention(self._recorder), torch.enable_grad():
            with self._recorder.on(forward), self._saving() as saved:
                loss = _loss(self._model(*args, **kwargs))
            tail = self._tail_bytes(loss)
            with self._recorder.on(backward):
                ends: Any = [loss, *self._pending]
                given = map(torch.empty_like, self._pending.values())
                torch.autograd.backward(ends, [None, *given])
        root = Cost(_total(saved, self._still), 0, True, forward, backward)
        return Probe(self._units(), root, tail)

    def _tail_bytes(self, loss: Tensor) -> int:
        """Of parameters whose gradients are complete before any unit's backward."""
        behind = leaves_behind(loss.grad_fn) - set().union(*map(leaves_behind, self._nodes))
        parameters = {id(p): p for p in self._model.parameters()}
        return sum(local_of(p).nbytes for key, p in parameters.items() if key in behind)

    def _units(self) -> dict[str, Cost]:
        found: dict[str, list[tuple[Cost, int]]] = {}
        for (name, _), cost in self._costs.items():
            found.setdefault(name, []).append(cost)
        return {name: in_one_unit(members) for name, members in found.items()}

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
        result = tree_map_only(Tensor, _leaf, out)
        return Cost(total, given, bool(wanted), forward, backward), result

    @contextmanager
    def _saving(self) -> Iterator[dict[int, int]]:
        """Bytes of what autograd saves, by storage."""
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            local = local_of(tensor.detach())
            saved[_storage(local)] = local.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved


def _kind(unit: nn.Module) -> tuple[object, ...]:
    """What else than shapes tells what ``unit`` computes: strides, say, or whether it recomputes.

    Numbers are left out: many a block has the index of its layer.
    """
    switches = (
        (name, key, value)
        for name, module in unit.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool)
    )
    return type(unit), str(unit), *switches


def _is_pending(out: Any) -> bool:
    """Whether ranks have yet to add up what they computed, as a divided embedding leaves it.

    Only the tensor itself can be added up; then its backward is booked on the root.
    """
    divided = (t for t in leaves_of(out) if isinstance(t, DTensor))
    return any(placement.is_partial() for t in divided for placement in t.placements)


def _storage(tensor: Tensor) -> int:
    return storage_key(local_of(tensor.detach()))


def _total(saved: Mapping[int, int], still: set[int]) -> int:
    return sum(nbytes for storage, nbytes in saved.items() if storage not in still)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _shape(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _loss(out: Any) -> Tensor:
    """Cross entropy in float32 of logits ``[..., vocabulary]``; of a scalar, itself."""
    found = getattr(out, "logits", out)
    first = leaves_of(found)[0]
    if first.ndim == 0:
        return first
    rows = first.flatten(0, -2).float()
    target = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    return F.cross_entropy(rows, target)
