"""Units inside a graph that ``torch.compile`` makes of what calls them.

[Note: opaque units]
Where a compiled function calls a unit, dynamo would trace its hooks, which wait for transfers and
swap parameters; and no graph can hold memory that is freed between forward and backward. Graphs
that may break do so there. Where they must not (``fullgraph=True``) the call becomes one operator,
opaque to the compiler. At run time it calls the module as anybody does:
hooks run as they are, and what they surround is compiled with the same backend into a graph of its
own, shared by all modules of one class. Autograd of the inside is recorded inside; the operator's
backward runs it, and gradients of parameters go where they always go.

The compiler must know what the operator returns. That is found by a *rehearsal*: the module's own
forward with tensors that have shapes and no memory, in which hooks cast and do nothing else.

A graph holds numbers and tensors only. It serves other modules of the same class, so the module
comes in as a tensor, its *handle*; numbers come in beside tensors, since they may differ from call
to call. Everything else about the place of the call is a constant of the graph. The handle
requires grad, and its gradient (zero) makes backward call the operator even for a unit whose inputs
require none.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyshard._torch.opaque import Compiler, constant_in_graphs, own_autograd, stand_ins
from polyshard.engine.root import unit_of, units_below
from polyshard.engine.trees import fill, outline
from polyshard.engine.unit import Phase
from polyshard.errors import UnsupportedError
from polyshard.failures import Kind, Part

Ran = tuple[list[Tensor], list[Tensor]]
"""Results and inputs of a call whose graph waits for its backward."""
Form = tuple[torch.dtype | int | None, ...]
"""Dtype and sizes of a tensor; ``None`` for a size that may differ from call to call."""


@dataclass
class Site:
    """One place in a graph where a unit is called."""

    module: weakref.ref[nn.Module]
    arguments: Any
    """What surrounds the tensors: see :func:`polyshard.engine.trees.outline`."""
    requires_grad: tuple[bool, ...]
    is_recorded: bool
    compiler: Compiler
    result: Any = None
    expected: list[Form] | None = None

    def call(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], numbers: Sequence[float]
    ) -> Any:
        """``function`` of the arguments, under autocast as where it was traced.

        Raises:
            UnsupportedError: when it changes one of the tensors in place, which no graph would see.
        """
        args, kwargs = fill(self.arguments, iter(tensors), iter(numbers))
        versions = _versions(tensors)
        with self.compiler.casting():
            result = function(*args, **kwargs)
        if _versions(tensors) != versions:
            raise UnsupportedError(
                "a sharded module changes a tensor that it is given, in place, inside a compiled "
                "function: what else that computes with the tensor would not see it. Change a "
                "copy and return it, or compile the module itself instead of what calls it."
            )
        return result

    def take_shapes(self, result: Any) -> list[Tensor]:
        """Learn from a rehearsal what the operator returns."""
        tensors: list[Tensor] = []
        self.result = outline(result, tensors)
        if self.expected is None:
            self.expected = [
                (t.dtype, *(n if type(n) is int else None for n in t.shape)) for t in tensors
            ]
        return tensors

    def check(self, module: nn.Module, results: Sequence[Tensor], around: object) -> None:
        """Refuse what the graph was not made for: it would read memory wrongly.

        What is ``around`` the tensors is a constant of the graph.
        """
        found: list[Form] = [(t.dtype, *t.shape) for t in results]
        expected = self.expected or []
        if len(found) != len(expected) or not all(map(_fits, found, expected)):
            raise UnsupportedError(
                f"{type(module).__name__} returned tensors of (dtype, sizes) {found} inside a "
                f"compiled graph made for {expected}. Have it return the same in every call, "
                "or compile the module itself instead of what calls it."
            )
        if around != self.result:
            raise UnsupportedError(
                f"{type(module).__name__} returned other numbers, texts or containers around its "
                "tensors than when the compiled graph that calls it was made, which has them as "
                "constants. Have it return the same in every call, return tensors for what "
                "changes, or compile the module itself instead of what calls it."
            )


def _fits(found: Form, wanted: Form) -> bool:
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(one in (None, own) for own, one in pairs)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place, as far as that is counted."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class Registry:
    """What operators find by number."""

    modules: weakref.WeakValueDictionary[int, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    sites: list[Site] = field(default_factory=list)
    waiting: dict[int, Ran] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def module(self, handle: Tensor) -> nn.Module:
        """Whose handle it is."""
        return self.modules[int(handle.detach().item())]


@functools.cache
def registry() -> Registry:
    """One a process: numbers in graphs mean the same everywhere."""
    return Registry()


def enroll(module: nn.Module) -> None:
    """Give ``module`` its handle. See [Note: opaque units]."""
    number = next(registry().numbers)
    registry().modules[number] = module
    handle = torch.tensor(float(number), dtype=torch.float64, device="cpu")
    module.__dict__["_polyshard_handle"] = handle.requires_grad_()


def calling(original: type[nn.Module]) -> Callable[..., Any]:
    """``__call__`` of a sharded class: the module's own, or one operator while dynamo traces."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which cannot break a graph where it tries
            if not _may_break():
                return _call_traced(self, args, kwargs)
            return original.__call__(self, *args, **kwargs)
        try:
            return original.__call__(self, *args, **kwargs)
        except RuntimeError as error:
            part = Part(original.__name__, kind=Kind.CALL)
            part.handler.explain(part, error)
            raise

    return call


# While dynamo traces --------------------------------------------------------------------------


def _call_traced(module: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    numbers: list[float] = []
    arguments = outline((args, kwargs), tensors, numbers)
    flags = tuple([tensor.requires_grad for tensor in tensors])
    handle = module._polyshard_handle
    site = _new_site(handle, arguments, flags, torch.is_grad_enabled())
    outputs = torch.ops.polyshard.call_unit(handle, site, tensors, numbers)
    return fill(_result_at(site), iter(outputs), iter(()))


@constant_in_graphs
def _may_break() -> bool:
    return Compiler.allows_breaks()


@constant_in_graphs
def _new_site(handle: Tensor, arguments: Any, flags: tuple[bool, ...], is_recorded: bool) -> int:
    module = registry().module(handle)
    unit = unit_of(module)
    assert unit is not None
    compiler = Compiler.of_trace(tuple({"cpu": None, unit.roles.device.type: None}))
    site = Site(weakref.ref(module), arguments, flags, is_recorded, compiler)
    registry().sites.append(site)
    return len(registry().sites) - 1


@constant_in_graphs
def _result_at(site: int) -> Any:
    return registry().sites[site].result


# The operator ---------------------------------------------------------------------------------


@torch.library.custom_op("polyshard::call_unit", mutates_args=())
def call_unit(
    handle: Tensor, site: int, tensors: list[Tensor], numbers: list[int | float | bool]
) -> list[Tensor]:
    """Call a unit as anybody does; the last tensor is the ticket that backward shows."""
    module, place = registry().module(handle), registry().sites[site]
    with own_autograd(place.is_recorded):
        inputs = [
            tensor.detach().requires_grad_(flag)
            for tensor, flag in zip(tensors, place.requires_grad, strict=True)
        ]
        results: list[Tensor] = []
        around = outline(place.call(_compiled(module, place.compiler), inputs, numbers), results)
    place.check(module, results, around)
    ticket = torch.tensor(next(registry().numbers), device="cpu")
    if place.is_recorded:
        number = int(ticket)
        registry().waiting[number] = results, inputs
        weakref.finalize(ticket, registry().waiting.pop, number, None).atexit = False
    return [*_unaliased(results, tensors), ticket]


def _compiled(module: nn.Module, compiler: Compiler) -> Callable[..., Any]:
    """The module's call, compiled as the graph around it was."""
    made: dict[Compiler, Callable[..., Any]]
    made = module.__dict__.setdefault("_polyshard_compiled", {})
    if compiler not in made:
        made[compiler] = compiler.compile(module._call_impl)
    return made[compiler]


def _unaliased(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``results`` without their graph; operators return no memory twice, nor their inputs'."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    found = []
    for result in results:
        out = result.detach()
        if out.untyped_storage()._cdata in seen:
            out = out.clone()
        seen.add(out.untyped_storage()._cdata)
        found.append(out)
    return found


@call_unit.register_fake
def _rehearse(
    handle: Tensor, site: int, tensors: list[Tensor], numbers: list[float]
) -> list[Tensor]:
    del handle
    place = registry().sites[site]
    module = place.module()
    assert module is not None
    with _rehearsal(module), torch.no_grad():
        shapes = place.take_shapes(place.call(module._call_impl, tensors, numbers))
    found = [torch.empty_like(shape) for shape in shapes]
    return [*found, torch.empty((), dtype=torch.int64, device="cpu")]


@contextmanager
def _rehearsal(module: nn.Module) -> Iterator[None]:
    units = [unit for _, _, unit in units_below(module)]
    phases = [unit.phase for unit in units]
    for unit in units:
        unit.phase = Phase.REHEARSAL
    try:
        with _no_trace(module), stand_ins(module, _shapes_of(module)):
            yield
    finally:
        for unit, phase in zip(units, phases, strict=True):
            unit.phase = phase


@contextmanager
def _no_trace(module: nn.Module) -> Iterator[None]:
    """Put back attributes, such as a count of calls, that a forward gave other values.

    Tensors stay, without values until the call: dynamo refuses to read them, where it would take
    older ones for those of this call.
    """
    held = [(each.__dict__, dict(each.__dict__)) for each in module.modules()]
    try:
        yield
    finally:
        for attributes, before in held:
            for name in [n for n, v in attributes.items() if not isinstance(v, Tensor)]:
                if name in before:
                    attributes[name] = before[name]
                else:
                    del attributes[name]


def _shapes_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters as forward sees them, and buffers; whatever mode makes tensors makes these."""
    dtypes = {
        id(sharded.parameter): group.info().param_dtype
        for _, _, unit in units_below(module)
        for group in unit.groups
        for sharded in group.shards.parameters
    }
    held: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    held.update(module.named_buffers(remove_duplicate=False))
    return {
        name: torch.empty(t.shape, dtype=dtypes.get(id(t), t.dtype), device=t.device)
        for name, t in held.items()
    }


@torch.library.custom_op("polyshard::call_unit_backward", mutates_args=())
def call_unit_backward(
    ticket: Tensor, gradients: list[Tensor], which: list[int], inputs: list[Tensor]
) -> list[Tensor]:
    """Run the backward recorded inside; gradients of the inputs, and zero for the handle."""
    results, leaves = registry().waiting[int(ticket.item())]
    pairs = [
        (results[index], gradient)
        for index, gradient in zip(which, gradients, strict=True)
        if results[index].requires_grad
    ]
    if pairs:
        with own_autograd(enabled=False):
            torch.autograd.backward([result for result, _ in pairs], [g for _, g in pairs])
    watched = [leaf for leaf in leaves if leaf.requires_grad]
    found = [_as_promised(*pair) for pair in zip(watched, inputs, strict=True)]
    return [*found, torch.zeros((), dtype=torch.float64, device="cpu")]


def _as_promised(leaf: Tensor, given: Tensor) -> Tensor:
    """The gradient of ``leaf``, laid out as the graph around expects it."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return torch.zeros_like(given)
    promised = torch.empty_like(given)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)


@call_unit_backward.register_fake
def _backward_shapes(
    ticket: Tensor, gradients: list[Tensor], which: list[int], inputs: list[Tensor]
) -> list[Tensor]:
    del ticket, gradients, which
    found = [torch.empty_like(given) for given in inputs]
    return [*found, torch.empty((), dtype=torch.float64, device="cpu")]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, site, tensors, numbers = inputs
    ctx.of_numbers = None if numbers else []  # torch takes an empty list for one of tensors
    ctx.flags = registry().sites[site].requires_grad
    watched = [t for t, flag in zip(tensors, ctx.flags, strict=True) if flag]
    ctx.save_for_backward(output[-1], *watched)
    ctx.mark_non_differentiable(output[-1])


def _run_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    ticket, *inputs = ctx.saved_tensors
    given = {i: g for i, g in enumerate(gradients[:-1]) if g is not None}
    *found, end = call_unit_backward(ticket, list(given.values()), list(given), inputs)
    rest = iter(found)
    return end, None, [next(rest) if flag else None for flag in ctx.flags], ctx.of_numbers


call_unit.register_autograd(_run_backward, setup_context=_remember)
