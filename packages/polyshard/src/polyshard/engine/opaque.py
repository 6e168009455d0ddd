"""Units inside a graph that ``torch.compile`` makes of what calls them.

[Note: opaque units]
Where a compiled function calls a unit, dynamo would trace its hooks, which wait for transfers and
swap parameters; and no graph can hold memory that is freed between forward and backward. So the
call becomes one operator, opaque to the compiler. At run time it calls the module as anybody does:
hooks run as they are, and what they surround is compiled with the same backend into a graph of its
own, shared by all modules of one class. Autograd of the inside is recorded inside; the operator's
backward runs it.

The compiler must know what the operator returns. That is found by a *rehearsal*: the module's own
forward with tensors that have shapes and no memory, in which hooks cast and do nothing else.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._torch.opaque import Compiler, own_autograd, stand_ins
from polyshard.engine.root import units_below
from polyshard.engine.unit import Phase
from polyshard.group.plan import resolve_dtypes


@dataclass
class Site:
    """One place in a graph where a unit is called: what surrounds the tensors."""

    spec: Any
    requires_grad: tuple[bool, ...]
    is_training: bool
    compiler: Compiler
    result_spec: Any = None

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        return fill(self.spec, iter(tensors))


TENSOR, CONSTANT, LIST, TUPLE, DICT = "tensor", "constant", "list", "tuple", "dict"


def outline(tree: Any, tensors: list[Tensor]) -> Any:
    """``tree`` without its tensors, which are appended to ``tensors``."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return (TENSOR,)
    if type(tree) is list:
        return (LIST, tuple([outline(x, tensors) for x in tree]))
    if type(tree) is tuple:
        return (TUPLE, tuple([outline(x, tensors) for x in tree]))
    if type(tree) is dict:
        return (DICT, tuple([(k, outline(v, tensors)) for k, v in tree.items()]))
    return (CONSTANT, tree)


def fill(shape: Any, tensors: Any) -> Any:
    """The inverse of :func:`outline`."""
    kind = shape[0]
    if kind == TENSOR:
        return next(tensors)
    if kind == LIST:
        return [fill(x, tensors) for x in shape[1]]
    if kind == TUPLE:
        return tuple([fill(x, tensors) for x in shape[1]])
    if kind == DICT:
        return {k: fill(v, tensors) for k, v in shape[1]}
    return shape[1]


@dataclass
class Registry:
    """What operators find by number, since a graph holds numbers and tensors only."""

    modules: weakref.WeakValueDictionary[int, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    sites: list[Site] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    compiled: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    rehearsing: dict[int, Any] = field(default_factory=dict)
    tickets: dict[int, Any] = field(default_factory=dict)


@functools.cache
def registry() -> Registry:
    return Registry()


def enroll(module: nn.Module) -> None:
    """Give ``module`` the tensor that operators know it by."""
    number = next(registry().numbers)
    registry().modules[number] = module
    handle = torch.tensor(float(number), dtype=torch.float64, device="cpu")
    handle.requires_grad_(any(p.requires_grad for p in module.parameters()))
    module.__dict__["_polyshard_handle"] = handle


def _module(handle: Tensor) -> nn.Module:
    return registry().modules[int(handle.detach().item())]


def site_for(handle, spec, requires_grad, is_training):
    site = Site(spec, requires_grad, is_training, Compiler.of_trace())
    registry().sites.append(site)
    registry().rehearsing[len(registry().sites) - 1] = _module(handle)
    return len(registry().sites) - 1


site_for._dynamo_marked_constant = True


def result_spec(site):
    return registry().sites[site].result_spec


result_spec._dynamo_marked_constant = True


def call_traced(module: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    spec = outline((args, kwargs), tensors)
    flags = tuple([x.requires_grad for x in tensors])
    handle = module._polyshard_handle
    site = site_for(handle, spec, flags, torch.is_grad_enabled())
    outputs = torch.ops.polyshard.call_unit(handle, site, tensors)
    return fill(result_spec(site), iter(outputs))


def calling(original: type[nn.Module]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return call_traced(self, args, kwargs)
        return original.__call__(self, *args, **kwargs)

    return __call__


@torch.library.custom_op("polyshard::call_unit", mutates_args=())
def call_unit(handle: Tensor, site: int, tensors: list[Tensor]) -> list[Tensor]:
    module, place = _module(handle), registry().sites[site]
    with own_autograd(place.is_training):
        inputs = [
            t.detach().requires_grad_(flag)
            for t, flag in zip(tensors, place.requires_grad, strict=True)
        ]
        args, kwargs = place.arguments(inputs)
        result = _compiled(module, place.compiler)(*args, **kwargs)
        results: list[Tensor] = []
        outline(result, results)
        ticket = torch.empty((), dtype=torch.int64)
        number = next(registry().numbers)
        ticket.fill_(number)
        if place.is_training:
            registry().tickets[number] = (results, inputs)
            weakref.finalize(ticket, registry().tickets.pop, number, None)
    held = {t.untyped_storage()._cdata for t in tensors}
    outs = []
    for r in results:
        out = r.detach()
        if out.untyped_storage()._cdata in held:
            out = out.clone()
        held.add(out.untyped_storage()._cdata)
        outs.append(out)
    return [*outs, ticket]


def _compiled(module: nn.Module, compiler: Compiler) -> Callable[..., Any]:
    cached = registry().compiled.setdefault(module, {})
    if compiler not in cached:
        ref = weakref.ref(module)
        cached[compiler] = compiler.compile(module._call_impl)
    return cached[compiler]


@call_unit.register_fake
def _(handle: Tensor, site: int, tensors: list[Tensor]) -> list[Tensor]:
    place = registry().sites[site]
    module = registry().rehearsing[site]
    args, kwargs = place.arguments(list(tensors))
    units = [unit for _, _, unit in units_below(module)]
    before = [unit.phase for unit in units]
    values = {}
    for unit in units:
        unit.phase = Phase.REHEARSAL
        for group in unit.groups:
            dtype = resolve_dtypes(group.setup.policy, group.shards.dtype).param
            for p in group.shards.parameters:
                for owner in p.owners:
                    values[id(owner.module), owner.name] = (p.parameter.shape, dtype)
    try:
        named = {}
        for prefix, sub in module.named_modules(remove_duplicate=False):
            for name, p in sub._parameters.items():
                if p is None: continue
                shape, dtype = values.get((id(sub), name), (p.shape, p.dtype))
                named[f"{prefix}.{name}" if prefix else name] = torch.empty(shape, dtype=dtype, device=p.device)
            for name, p in sub._buffers.items():
                if p is None: continue
                named[f"{prefix}.{name}" if prefix else name] = torch.empty_like(p)
        with stand_ins(module, named), torch.no_grad():
            result = module._call_impl(*args, **kwargs)
    finally:
        for unit, phase in zip(units, before, strict=True):
            unit.phase = phase
    leaves = []
    place.result_spec = outline(result, leaves)
    outs = [torch.empty_like(x) for x in leaves]
    return [*outs, torch.empty((), dtype=torch.int64, device="cpu")]


@torch.library.custom_op("polyshard::call_unit_backward", mutates_args=())
def call_unit_backward(ticket: Tensor, gradients: list[Tensor], which: list[int], inputs: list[Tensor]) -> list[Tensor]:
    results, leaves = registry().tickets[int(ticket.item())]
    with own_autograd(False):
        torch.autograd.backward([results[i] for i in which if results[i].requires_grad], [g for g, i in zip(gradients, which) if results[i].requires_grad])
    found = []
    for leaf in leaves:
        if leaf.requires_grad:
            grad = leaf.grad
            if grad is None:
                grad = torch.zeros_like(leaf)
            elif grad.stride() != torch.empty_like(leaf).stride():
                grad = torch.empty_like(leaf).copy_(grad)
            leaf.grad = None
            found.append(grad)
    return [*found, torch.zeros((), dtype=torch.float64)]


@call_unit_backward.register_fake
def _(ticket, gradients, which, inputs):
    return [*(torch.empty_like(i) for i in inputs), torch.empty((), dtype=torch.float64, device="cpu")]


def _setup(ctx, inputs, output):
    handle, site, tensors = inputs
    ctx.site = site
    flags = registry().sites[site].requires_grad
    ctx.flags = flags
    ctx.save_for_backward(output[-1], *[t for t, f in zip(tensors, flags) if f])
    ctx.mark_non_differentiable(output[-1])


def _backward(ctx, grads):
    ticket, *inputs = ctx.saved_tensors
    which = [i for i, g in enumerate(grads[:-1]) if g is not None]
    *found, end = call_unit_backward(ticket, [grads[i] for i in which], which, inputs)
    found = iter(found)
    return end, None, [next(found) if f else None for f in ctx.flags]


call_unit.register_autograd(_backward, setup_context=_setup)
