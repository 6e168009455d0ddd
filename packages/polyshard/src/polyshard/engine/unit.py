"""When groups are gathered, freed and reduced: hooks around forward and backward.

[Note: hooks]
Four moments matter to a unit. *Pre-forward* gathers. *Post-forward* frees, and hooks the outputs
that require grad. *Pre-backward* (the first such output receives its gradient) gathers again and
starts to gather the unit that ran before. *Post-backward* (all inputs that require grad have
received theirs, through an identity in the graph) reduces and frees. A unit none of whose inputs
require grad has no such identity; the callback at the end of the whole backward reduces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyshard._torch.private import in_backward
from polyshard._torch.untraced import untraced
from polyshard.engine.context import Phase, RootContext
from polyshard.engine.trees import cast_floating, map_tensors, tensors
from polyshard.errors import UnsupportedError
from polyshard.group.group import ParameterGroup, State

if TYPE_CHECKING:
    from polyshard.policies import MixedPrecisionPolicy
    from polyshard.sharding.mesh import MeshRoles


class Unit:
    """What one ``fully_shard`` call covers: modules that are gathered and freed together."""

    def __init__(
        self, modules: tuple[nn.Module, ...], roles: MeshRoles, policy: MixedPrecisionPolicy
    ) -> None:
        """Nothing is hooked before :meth:`attach`."""
        self.modules = modules
        self.roles = roles
        self.policy = policy
        self.name = ""
        self.groups: list[ParameterGroup] = []
        self.context = RootContext()
        self.phase = Phase.IDLE
        self.is_root: bool | None = None
        self.reshard_after_forward: bool | int | None = None
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.order: list[int] = []
        self.pending_modules: set[nn.Module] = set()

    def attach(self) -> None:
        """Hook the modules, once all groups are sharded."""
        before, after = untraced(self.pre_forward), untraced(self.post_forward)
        for module in self.modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)

    # Gathering --------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to gather every group."""
        for group in self.groups:
            group.unshard()

    def wait(self) -> None:
        """Finish gathering every group."""
        for group in self.groups:
            group.wait()

    def reshard(self) -> None:
        """Free every group."""
        for group in self.groups:
            group.reshard()

    def is_sharded(self) -> bool:
        """Whether no group is gathered or on the way."""
        return all(group.state is State.SHARDED for group in self.groups)

    def keeps_unsharded(self) -> bool:
        """Whether parameters stay gathered between forward and backward.

        Unless told otherwise the root does: its backward follows at once. That reason is gone
        without grad mode, where staying gathered would only let parameters fall out of date.
        """
        if self.reshard_after_forward is None:
            return bool(self.is_root) and torch.is_grad_enabled()
        return not self.reshard_after_forward

    @property
    def reshards_in_training(self) -> bool:
        """Whether a training forward frees the parameters."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return bool(self.reshard_after_forward)

    # Forward ----------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather before ``module`` runs; cast and watch its inputs. See [Note: hooks]."""
        if self.phase is Phase.PRE_BACKWARD:
            # Activation checkpointing recomputes this forward inside backward: the pre-backward
            # gathered already (or a repeated forward's post-backward freed since).
            self.unshard()
            self.wait()
            return self._cast_inputs(args, kwargs)
        entering = self.phase is not Phase.FORWARD
        if not entering:
            args, kwargs = self._cast_inputs(args, kwargs)
            self.unshard()
            self.wait()
            return args, kwargs
        args, kwargs = self._enter_forward(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        self._gather_for_forward()
        return self._watch_inputs(args, kwargs)

    def _gather_for_forward(self) -> None:
        """Gather, and start on what comes next. See [Note: order]."""
        self.unshard()
        follower = None if in_backward() else self.context.replay.enter(self)
        for unit in self.forward_prefetch:
            unit.unshard()
        self.context.lookahead.forward(len(self.context._order))
        self.wait()
        if follower is not None and not self.forward_prefetch and follower.is_sharded():
            follower.unshard()
            self.context.replay.note_early(follower)

    def _enter_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.is_root is None:
            self.become_root()
        self.phase = Phase.FORWARD
        self.pending_modules.update(self.modules)
        if self.context.forward_root is None:
            self.context.begin_forward(self)
            self.context.replay.begin(self)
            if self.roles.device.type != "cpu":
                self.context.wait_for_optimizer()
                device = self.roles.device
                args, kwargs = map_tensors(lambda t: t.to(device), (args, kwargs))
            self.context.refresh(self)
        return args, kwargs

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (self.policy.cast_forward_inputs and self.policy.param_dtype):
            return args, kwargs
        cast: tuple[tuple[Any, ...], dict[str, Any]]
        cast = cast_floating(self.policy.param_dtype, (args, kwargs))
        return cast

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (self.groups and torch.is_grad_enabled()):
            return args, kwargs
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        if not inputs:
            return args, kwargs
        identities = _PostBackward.apply(self, *inputs)  # type: ignore[no-untyped-call]
        outputs = iter(identities)
        watched: tuple[tuple[Any, ...], dict[str, Any]]
        watched = map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))
        return watched

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free after ``module`` has run; watch and cast its outputs. See [Note: hooks]."""
        del args
        if self.phase is Phase.PRE_BACKWARD:  # recomputation: post-backward frees
            return self._cast_output(output)
        self.pending_modules.discard(module)
        if not self.pending_modules:
            self._leave_forward()
        self._watch_output(output)
        if self.context.forward_root is self:
            self._end_root_forward()
        return self._cast_output(output)

    def _leave_forward(self) -> None:
        self.phase = Phase.IDLE
        if in_backward():  # recomputed by an outer checkpoint: needed again in a moment
            return
        if not self.keeps_unsharded():
            until_backward = torch.is_grad_enabled()
            for group in self.groups:
                group.reshard(until_backward=until_backward)
        self.context.note_forward(self)

    def _end_root_forward(self) -> None:
        """Close units of which only some modules ran, so that nothing stays gathered."""
        for unit in reversed(self.context.units):
            if unit.phase is Phase.FORWARD:
                unit.pending_modules.clear()
                unit._leave_forward()
        for unit in self.context.replay.end():
            unit.reshard()
        self.context.end_forward()

    def _watch_output(self, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._pre_backward)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(dtype, output)

    # Backward ---------------------------------------------------------------------------------

    def _pre_backward(self, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"unit '{self.name}': backward was called with create_graph=True. Gradients leave "
                "autograd when they are reduced, so they cannot be differentiated again. Compute "
                "the first gradients with a model that is not sharded, or without create_graph."
            )
        self.context.queue_end_of_backward()
        if self.phase is Phase.PRE_BACKWARD:
            return gradient
        self.phase = Phase.PRE_BACKWARD
        for group in self.groups:
            if group.unshard_in_backward:
                group.unshard()
        self._prefetch_backward()
        self.wait()
        return gradient

    def _prefetch_backward(self) -> None:
        before = self.context.unit_before(self)
        targets: Sequence[Unit] = self.backward_prefetch
        if not targets and before is not None and before is not self:
            targets = (before,)
        for unit in targets:
            for group in reversed(unit.groups):
                if group.unshard_in_backward:
                    group.unshard()
        self.context.lookahead.backward(before)

    def post_backward(self) -> None:
        """Reduce and free, or accumulate. Harmless for a unit that took no part."""
        self.phase = Phase.POST_BACKWARD
        for group in reversed(self.groups):
            if not group.reduces:
                group.accumulate()
                if group.reshard_after_backward:
                    group.reshard()
                continue
            gradients = group.take_gradients()
            if group.reshard_after_backward:
                group.reshard()
            if gradients or group.expects_gradients():
                self.context.reduce(group, gradients)

    # Life cycle -------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Forget the order of this step, and free what was prefetched for nothing.

        A gather still under way would read shards that the optimizer is about to change.
        """
        self.order.clear()
        for group in self.groups:
            if group.reshard_after_backward or group.state is State.GATHERING:
                group.reshard()
            group.drop_block()

    def become_root(self) -> None:
        """Take charge of all units below; called at the first forward of the outermost one.

        Raises:
            LifecycleError: when a unit below already ran on its own, or the root is a list.
            PlanMismatchError: when ranks planned different things; the next forward looks again.
        """
        from polyshard.engine.root import initialize_root

        initialize_root(self)

    def reset(self) -> None:
        """Forget the iteration; end sharded."""
        self.phase = Phase.IDLE
        self.order.clear()
        self.pending_modules.clear()
        for group in self.groups:
            group.discard()


class _PostBackward(torch.autograd.Function):
    """An identity on a unit's inputs whose backward runs after the unit's own."""

    @override
    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return inputs

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.unit.post_backward()
        return (None, *gradients)
