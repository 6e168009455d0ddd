"""When groups are gathered, freed and reduced: hooks around forward and backward.

[Note: hooks]
Four moments matter to a unit. *Pre-forward* gathers. *Post-forward* frees, and hooks the outputs
that require grad. *Pre-backward* (the first such output receives its gradient) gathers again and
starts to gather the unit that ran before. *Post-backward* (all inputs that require grad have
received theirs, through an identity in the graph) reduces and frees. A unit none of whose inputs
require grad has no such identity; the callback at the end of the whole backward reduces it.

An output may be a view: of what a linear layer computes from three dims, say. Changing it in place
(``y += x``) makes it another node of the graph, and a hook would stay with the old one. So what it
is a view of is hooked instead, if the unit computed that.

[Note: calls in calls]
A module may call itself, or a method that ``register_fsdp_forward_method`` has wrapped. The unit
stays gathered until the outermost of these calls ends, and they are counted. An interrupt
(Control-C) ends calls without telling hooks, so a count of more than one is checked in the stack.

[Note: transforms]
Under ``torch.func`` (``jvp`` above all) inputs and outputs are wrapped, and what hooks do with them
(casting, watching) is part of the function transformed. Gathering and freeing is not: it handles
plain tensors, outside of all transforms. Inside a transform an output may say that it requires no
grad although gradients of the whole will pass it later, so there an identity in the graph takes
the place of a hook on the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyshard._torch.gloo import await_values
from polyshard._torch.private import (
    calls_under_way,
    in_backward,
    is_made_since,
    next_node,
    outside_transforms,
    transforms_run,
    untraced,
)
from polyshard.engine.root import initialize_root
from polyshard.engine.trees import cast_floating, map_tensors, tensors
from polyshard.engine.unit import Phase, Unit
from polyshard.errors import UnsupportedError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is called with: positional arguments, and those by name."""


class UnitHooks:
    """What happens around forward and backward of one unit. See [Note: hooks].

    All state is the unit's, so that there may be several of these for one.
    """

    def __init__(self, unit: Unit) -> None:
        """Nothing is hooked before :meth:`attach`."""
        self._unit = unit
        self._before, self._after = untraced(self._pre_forward), untraced(self._post_forward)
        self._always = untraced(self._left_forward)

    def attach(self) -> None:
        """Hook the modules, once all groups are sharded."""
        for module in self._unit.modules:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after)
            module.register_forward_hook(self._always, always_call=True)

    def around(self, module: nn.Module, method: Callable[..., Any]) -> MethodType:
        """``method`` of ``module``, which gathers and frees parameters as ``forward`` does."""

        @functools.wraps(method)
        def gathered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._gathered(module, method, args, kwargs)

        return MethodType(gathered, module)

    def _gathered(
        self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        output = None
        try:
            args, kwargs = self._before(module, args, kwargs)
            output = self._after(module, args, method(*args, **kwargs))
        except Exception:
            self._always(module, args, None)
            raise
        self._always(module, args, output)
        return output

    def parts(self) -> tuple[Callable[..., Arguments], Callable[..., Any]]:
        """What is done before a forward and what after, for a caller that runs it in between.

        These calls are not counted: the caller does not say when one of them raises.
        """

        def before(module: nn.Module, args: Any, kwargs: Any) -> Arguments:
            del module
            return self._begin(args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            del args
            return self._end(module, output, is_inner=self._has_calls(module, own=0))

        return untraced(before), untraced(after)

    # Forward ----------------------------------------------------------------------------------

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Gather before ``module`` runs; cast and watch its inputs."""
        self._unit.calls[module] += 1
        return self._begin(args, kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        unit = self._unit
        if unit.phase is Phase.REHEARSAL:
            return self._cast_inputs(args, kwargs)
        if unit.phase in (Phase.FORWARD, Phase.PRE_BACKWARD):
            # Another module of the unit, or activation checkpointing recomputing this forward
            # inside backward: gathered already (or freed since by a repeated one's post-backward).
            unit.unshard()
            unit.wait()
            if unit.watch is not None:
                unit.watch.begin_forward(unit.name)
            return self._cast_inputs(args, kwargs)
        args, kwargs = self._enter_forward(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        self._gather_for_forward()
        if unit.watch is not None:
            unit.watch.begin_forward(unit.name)
        unit.first_node = next_node()
        return self._watch_inputs(args, kwargs)

    def _enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        unit = self._unit
        unit.context.finalization.check_line("the next forward")
        if unit.is_root is None:
            initialize_root(unit)
        unit.phase = Phase.FORWARD
        unit.pending_modules.update(unit.modules)
        if unit.context.forward_root is None:
            return self._begin_outermost(args, kwargs)
        return args, kwargs

    def _begin_outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        unit, context, device = self._unit, self._unit.context, self._unit.roles.device
        context.begin_forward(unit)
        if not in_backward():  # a recomputation shows nothing of the order
            context.prefetcher.begin(unit)
        context.wait_for_optimizer(device)
        if device.type != "cpu":
            # As torch's engine does: dataclasses know where they want their tensors.
            args, kwargs = map_tensors(lambda t: t.to(device), (args, kwargs), opens=False)
        context.refresh(unit)
        return args, kwargs

    def _gather_for_forward(self) -> None:
        """Gather, and start on what comes next. See [Note: prefetch]."""
        unit, prefetcher = self._unit, self._unit.context.prefetcher
        unit.unshard()
        for other in unit.forward_prefetch:
            other.unshard()
        follower = None if in_backward() else prefetcher.enter(unit)
        unit.wait()
        if follower is not None and not unit.forward_prefetch:
            prefetcher.gather_early(follower)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        policy = self._unit.policy
        if not (policy.cast_forward_inputs and policy.param_dtype):
            return args, kwargs
        cast: Arguments = cast_floating(policy.param_dtype, (args, kwargs))
        return cast

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if not (self._unit.groups and torch.is_grad_enabled()):
            return args, kwargs
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if not inputs:
            return args, kwargs
        identities = _PostBackward.apply(self._unit, *inputs)  # type: ignore[no-untyped-call]
        outputs = iter(identities)
        watched: Arguments
        watched = map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))
        return watched

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free after ``module`` has run; watch and cast its outputs."""
        del args
        return self._end(module, output, is_inner=self._has_calls(module, own=1))

    def _has_calls(self, module: nn.Module, *, own: int) -> bool:
        """Whether more calls of ``module`` are under way than ``own``: [Note: calls in calls]."""
        calls = self._unit.calls
        if calls[module] > own:
            calls[module] = calls_under_way(module, self._gathered)
        return calls[module] > own

    def _end(self, module: nn.Module, output: Any, *, is_inner: bool) -> Any:
        unit = self._unit
        self._end_watch()
        if is_inner or unit.phase in (Phase.PRE_BACKWARD, Phase.REHEARSAL):
            return self._cast_output(output)  # recomputed: post-backward frees
        is_outermost = unit.context.forward_root is unit
        if is_outermost:
            for tensor in tensors(output):  # see [Note: let down elsewhere] of resilience
                await_values(tensor)
        unit.pending_modules.discard(module)
        if not unit.pending_modules:
            _leave_forward(unit)
        output = self._watch_output(output)
        if is_outermost:
            self._end_outermost()
        return self._cast_output(output)

    def _left_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module's forward is over, whatever happened: if its end was not seen, an exception.

        Also called after :meth:`_post_forward`, which leaves nothing to do here.
        """
        del args, output
        calls, is_inner = self._unit.calls, self._has_calls(module, own=1)
        calls[module] = calls[module] - 1 if is_inner else 0
        self._end_watch()
        if is_inner:  # an exception of it gets to the outer call, unless the model catches it
            return
        context = self._unit.context
        if context.forward_root is self._unit and self._unit.pending_modules:
            if context.turn.in_backward:
                # A recomputation ends by an exception once it has what the backward needs. Should
                # it be another one, it breaks the backward. The end of that frees all units.
                context.leave_recomputation()
            else:
                context.forward_broke()

    def _end_watch(self) -> None:
        unit = self._unit
        if unit.watch is not None:
            unit.watch.end_forward(unit.name)

    def _end_outermost(self) -> None:
        """Close units of which only some modules ran, so that nothing stays gathered."""
        context = self._unit.context
        for unit in reversed(context.units):
            if unit.phase is Phase.FORWARD:
                unit.pending_modules.clear()
                _leave_forward(unit)
        context.prefetcher.end()
        context.end_forward()

    def _watch_output(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        is_transformed = transforms_run()
        watch = self._pre_backward_of_transform if is_transformed else self._pre_backward
        finalization = self._unit.context.finalization
        finalization.is_busy = finalization.is_busy or is_transformed
        for tensor in tensors(output):
            if tensor.requires_grad:
                finalization.is_busy = True
                self._lasting(tensor, is_transformed).register_hook(watch)
        return self._watch_transformed(output) if is_transformed else output

    def _lasting(self, output: Tensor, is_transformed: bool) -> Tensor:
        """What a hook on ``output`` is kept by if that is changed in place. See [Note: hooks]."""
        base = output._base
        if base is None or is_transformed or not is_made_since(self._unit.first_node, base):
            return output
        return base

    def _watch_transformed(self, output: Any) -> Any:
        """Watch outputs that require no grad as far as the transform shows."""

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            watched: Tensor = _PreBackward.apply(self, tensor)  # type: ignore[no-untyped-call]
            return watched

        return map_tensors(watch, output)

    def _cast_output(self, output: Any) -> Any:
        dtype = self._unit.policy.output_dtype
        return output if dtype is None else cast_floating(dtype, output)

    # Backward ---------------------------------------------------------------------------------

    def _pre_backward(self, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self._refuse_double_backward()
        self._enter_backward()
        return gradient

    def _pre_backward_of_transform(self, gradient: Tensor) -> Tensor:
        """``torch.func.grad`` makes a graph of every backward, and few differentiate it again."""
        self._enter_backward()
        return gradient

    def _refuse_double_backward(self) -> None:
        raise UnsupportedError(
            f"unit '{self._unit.name}': backward was called with create_graph=True. Gradients "
            "leave autograd when they are reduced, so they cannot be differentiated again. Compute "
            "the first gradients with a model that is not sharded, or without create_graph."
        )

    @outside_transforms
    def _enter_backward(self) -> None:
        unit, context = self._unit, self._unit.context
        if not context.turn.in_backward:
            context.queue_end_of_backward()
        if not (unit.is_root and context.reached):
            context.reached = unit.name
        if unit.phase is Phase.PRE_BACKWARD:
            return
        unit.phase = Phase.PRE_BACKWARD
        for group in unit.groups:
            if group.unshard_in_backward:
                group.unshard()
        self._prefetch_backward()
        for group in unit.groups:
            group.wait()
            if group.gradients.waiting.unsharded:
                group.gradients.lend(group.prepare())
        if unit.watch is not None:
            unit.watch.begin_backward(unit.name)

    def _prefetch_backward(self) -> None:
        unit, prefetcher = self._unit, self._unit.context.prefetcher
        before = prefetcher.order.before(unit)
        targets: Sequence[Unit] = unit.backward_prefetch
        if not targets and before is not None and before is not unit:
            targets = (before,)
        for target in targets:
            for group in reversed(target.groups):
                if group.unshard_in_backward:
                    group.unshard()
        if before is not None and prefetcher.reach:
            prefetcher.tell_before(before)


@outside_transforms
def _leave_forward(unit: Unit) -> None:
    unit.phase = Phase.IDLE
    if in_backward():  # recomputed by an outer checkpoint: needed again in a moment
        return
    if not unit.keeps_unsharded():
        until_backward = torch.is_grad_enabled()
        for group in unit.groups:
            group.reshard(until_backward=until_backward)
    unit.context.prefetcher.order.leave(unit)


class _PostBackward(torch.autograd.Function):
    """An identity on a unit's inputs whose backward runs after the unit's own."""

    generate_vmap_rule = True

    @override
    @staticmethod
    def forward(unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @override
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.unit = inputs[0]
        ctx.set_materialize_grads(False)  # no gradient is none upstream either, and not zeros

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.unit.post_backward()
        return (None, *gradients)

    @override
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        return tuple(None if t is None else t.view_as(t) for t in tangents[1:])


class _PreBackward(torch.autograd.Function):
    """An identity on an output, whose backward runs first. See [Note: transforms]."""

    generate_vmap_rule = True

    @override
    @staticmethod
    def forward(hooks: UnitHooks, output: Tensor) -> Tensor:
        return output

    @override
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, ctx.hooks._pre_backward_of_transform(gradients[0])

    @override
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        tangent = tangents[1]  # a path of its own into backward, to be watched as the output is
        if tangent is None:
            return None
        return _PreBackward.apply(ctx.hooks, tangent)  # type: ignore[no-untyped-call]
