"""One parameter group at run time: unshard, reshard, reduce.

A group is SHARDED (only the shard buffer has memory), GATHERING (a transfer fills the unsharded
buffer) or UNSHARDED (the modules hold the unsharded parameters). Every transition may be asked for
at any time; one that has happened already is a no-op.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from polyshard._torch_private import profiler_span
from polyshard.constraints import check_constraints
from polyshard.failures import FailureReport
from polyshard.layout import plan_layout
from polyshard.mesh import MeshRoles
from polyshard.notices import policy_notices, warn
from polyshard.pages import PagePool
from polyshard.parameter import Source
from polyshard.plan import Dtypes, GroupPlan, Roles
from polyshard.policies import MixedPrecisionPolicy
from polyshard.protocol import ProtocolGather, ProtocolShards, refuse_claims, uses_protocol
from polyshard.reduction import InFlight, ReduceSettings
from polyshard.runtime import Parts, Runtime, build_runtime
from polyshard.seams import GroupInfo, Named, ParamInfo, Stack
from polyshard.shards import Shards
from polyshard.transport.base import Pending


class State(Enum):
    """Which form of its parameters a group holds."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


@dataclass(frozen=True)
class GroupSetup:
    """What a group is made from, apart from its parameters."""

    name: str
    roles: MeshRoles
    policy: MixedPrecisionPolicy
    stack: Stack
    reshard_after_forward: bool


@dataclass
class Traffic:
    """What a group has moved so far on this rank, in bytes and calls."""

    sent_bytes: int = 0
    received_bytes: int = 0
    gathers: int = 0
    reductions: int = 0
    wait_seconds: float = 0.0


class ParameterGroup:
    """The parameters of a unit that communicate together."""

    def __init__(self, sources: Sequence[Source], setup: GroupSetup) -> None:
        """Plan a group of ``sources``, which share one original dtype; nothing changes yet."""
        self.setup = setup
        self.name = setup.name
        self.roles = setup.roles
        self.state = State.SHARDED
        self.traffic = Traffic()
        self.reduces = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.reduce_settings = ReduceSettings()
        self.pool: PagePool | None = None
        self.device = setup.roles.device
        info = self._info(tuple(s.info for s in sources), sources[0].value.dtype)
        warn(policy_notices(setup.policy, info.orig_dtype))
        self.contributions = setup.stack.contributions(info)
        if uses_protocol(sources):
            refuse_claims(self.contributions, info)
        self.observers = self.contributions.observers
        self._transport = self.contributions.backend.connect(setup.roles, self.device)
        layout = plan_layout(
            [s.shape for s in sources],
            setup.roles.shard_size,
            info.orig_dtype.itemsize,
            self._transport.staging_bytes,
        )
        check_constraints(self.contributions.constraints, info, layout)
        self._failures = FailureReport(setup.roles.ranks, self.name)
        self._sources: Sequence[Source] = sources
        self._layout = layout
        self._storage = self.contributions.storage.create(info, layout)
        self.shards: Shards
        self._runtime: Runtime | None = None
        self._pending: Pending | None = None
        self._gathered_versions: list[int] = []
        self._accumulated: dict[int, Tensor] = {}
        self._has_unreduced = False
        self._stale = True

    def shard(self) -> None:
        """Cut the parameters and register their sharded forms; called once, when all plans hold."""
        if uses_protocol(self._sources):
            self.shards = ProtocolShards(self._sources, self._layout, self.roles)
        else:
            self.shards = Shards(self._sources, self._layout, self.roles, self._storage)
        self._sources = ()  # the full parameters may go now

    # --- plan ---------------------------------------------------------------------------------

    def _dtypes(self, orig: torch.dtype) -> Dtypes:
        policy = self.setup.policy
        param = policy.param_dtype if orig.is_floating_point else None
        compute = param or orig
        return Dtypes(orig, compute, policy.reduce_dtype or compute)

    def info(self) -> GroupInfo:
        """The group as plugins see it, with current names and dtypes."""
        return self._info(tuple(p.info for p in self.shards.parameters), self.shards.dtype)

    def _info(self, parameters: tuple[ParamInfo, ...], orig: torch.dtype) -> GroupInfo:
        dtypes = self._dtypes(orig)
        return GroupInfo(
            name=self.name,
            parameters=parameters,
            mesh=self.roles.mesh,
            rank=self.roles.shard_rank,
            world_size=self.roles.shard_size,
            device=self.device,
            orig_dtype=dtypes.orig,
            param_dtype=dtypes.param,
            reduce_dtype=dtypes.reduce,
        )

    def rename(self, name: str, fqns: Mapping[int, str]) -> None:
        """Take the names that the root gives: the unit's, and each parameter's by identity."""
        self.name = name
        self._failures = FailureReport(self.roles.ranks, name)
        for parameter in self.shards.parameters:
            fqn = fqns.get(id(parameter.parameter), parameter.info.fqn)
            parameter.info = replace(parameter.info, fqn=fqn)
        self._runtime = None  # transfers are tagged with the name, which ranks must agree on
        self._stale = True

    def plan(self) -> GroupPlan:
        """The description that ranks compare and ``describe()`` shows."""
        contributions = self.contributions
        runtime = self.prepare()
        trainable = {
            i: torch.empty(placed.shape, dtype=runtime.dtypes.param, device="meta")
            for i, (p, placed) in enumerate(
                zip(self.shards.parameters, self.shards.layout.parameters, strict=True)
            )
            if p.parameter.requires_grad
        }
        return GroupPlan(
            name=self.name,
            parameters=tuple(
                replace(p.info, requires_grad=p.parameter.requires_grad)
                for p in self.shards.parameters
            ),
            layout=self.shards.layout,
            mesh=self.roles.describe(),
            dtypes=runtime.dtypes,
            roles=Roles(
                self._transport.name,
                self._gather_codec_name(runtime),
                _named(contributions.reduce_codec),
                _named(contributions.storage),
                contributions.plugin_lines,
            ),
            reshard_after_forward=self.setup.reshard_after_forward,
            gather_bytes=runtime.path.sent_bytes,
            reduce_bytes=runtime.reducer.predicted_bytes(trainable, self._wire_dtype()),
            notices=policy_notices(self.setup.policy, self.shards.dtype),
        )

    def _gather_codec_name(self, runtime: Runtime) -> str:
        if isinstance(runtime.path, ProtocolGather):
            return f"tensor class ({runtime.path.payload_bytes} bytes)"
        return _named(self.contributions.gather_codec)

    # --- life cycle ---------------------------------------------------------------------------

    def mark_stale(self) -> None:
        """Parameters may have been replaced or moved: look before the next use."""
        self._stale = True

    def prepare(self) -> Runtime:
        """Everything the step needs, made on first use and after a conversion."""
        runtime = self._runtime
        if runtime is not None and not (self._stale or self.shards.buffer.is_meta):
            return runtime
        self._stale = False
        # Everything made here outlives the call, which may come from a forward in inference mode.
        with torch.inference_mode(mode=False):
            if self.shards.adopt_replaced() or runtime is None:
                runtime = self._runtime = self._build()
        return runtime

    def _build(self) -> Runtime:
        parts = Parts(
            info=self.info(),
            shards=self.shards,
            roles=self.roles,
            policy=self.setup.policy,
            contributions=self.contributions,
            transport=self._transport,
            onion=self.setup.stack.onion,
            pool=self.pool,
        )
        runtime = build_runtime(parts, self._dtypes(self.shards.dtype))
        runtime.reducer.settings = self.reduce_settings
        return runtime

    def unshard(self) -> None:
        """Begin to gather, unless gathered or on the way."""
        runtime = self.prepare()
        if self.state is not State.SHARDED:
            if self.state is State.UNSHARDED and self._shards_changed():
                self.reshard()
            else:
                return
        self.shards.check_materialized()
        with self._failures, profiler_span("polyshard.unshard", self.name):
            runtime.buffer.acquire()
            self._gathered_versions = self.shards.versions()
            self.shards.fetch()
            self._pending = runtime.path.start()
        self.state = State.GATHERING  # only now: a start that raised leaves the group sharded
        self.traffic.gathers += 1
        self.traffic.sent_bytes += runtime.path.sent_bytes
        self.traffic.received_bytes += runtime.path.received_bytes
        for observer in self.observers:
            observer.on_unshard(self.name, runtime.path.sent_bytes)

    def _shards_changed(self) -> bool:
        """Whether an optimizer (or anybody) wrote to the shards since they were gathered.

        Parameters kept unsharded across an optimizer step would otherwise be silently out of date.
        """
        return self.shards.versions() != self._gathered_versions

    def wait(self) -> None:
        """Finish the gather and register the unsharded parameters."""
        if self.state is not State.GATHERING:
            return
        runtime = self.prepare()
        assert self._pending is not None
        begin = time.perf_counter()
        with self._failures, profiler_span("polyshard.wait", self.name):
            self._pending.wait()
            runtime.path.finish()
        self._pending = None
        self.shards.storage.release()
        self._sync_requires_grad(runtime)
        runtime.registry.register()
        self.state = State.UNSHARDED
        seconds = time.perf_counter() - begin
        self.traffic.wait_seconds += seconds
        for observer in self.observers:
            observer.on_unsharded(self.name, seconds)

    def _sync_requires_grad(self, runtime: Runtime) -> None:
        """Freezing and unfreezing happens on the sharded parameter; the leaf follows."""
        for sharded, leaf in zip(self.shards.parameters, runtime.leaves, strict=True):
            wanted = sharded.parameter.requires_grad
            if leaf.requires_grad is not wanted:
                leaf.requires_grad_(wanted)

    def reshard(self) -> None:
        """Free the unsharded parameters and register the sharded ones."""
        if self.state is State.GATHERING:
            self.wait()
        if self.state is State.SHARDED or self._runtime is None:
            return
        with profiler_span("polyshard.reshard", self.name):
            self.shards.registry.register()
            self._runtime.buffer.release()
        self.state = State.SHARDED
        for observer in self.observers:
            observer.on_reshard(self.name)

    # --- gradients ----------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Keep this backward's gradients unsharded, in the reduce dtype, for a later reduction."""
        runtime = self._runtime
        if runtime is None:
            return
        self._has_unreduced = True
        for index, leaf in enumerate(runtime.leaves):
            if leaf.grad is not None and leaf.grad.dtype != runtime.dtypes.reduce:
                gradient = self._flattened(index, leaf.grad)
                self._accumulated[index] = self._sum(index, gradient, runtime.dtypes.reduce)
                leaf.grad = None

    def _flattened(self, index: int, gradient: Tensor) -> Tensor:
        parameter = self.shards.parameters[index]
        if not any(e is not None for e in parameter.extensions):
            return gradient
        with torch.no_grad():
            return self.setup.stack.onion.flatten(gradient, parameter.info)[0]

    def _sum(self, index: int, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        held = self._accumulated.get(index)
        return gradient.to(dtype) if held is None else held.add_(gradient)

    def take_gradients(self) -> dict[int, Tensor]:
        """Unsharded gradients by parameter index; the leaves give them up."""
        runtime = self._runtime
        if runtime is None:
            return {}
        taken: dict[int, Tensor] = {}
        for index, leaf in enumerate(runtime.leaves):
            gradient = leaf.grad
            if gradient is not None:
                leaf.grad = None
                gradient = self._flattened(index, gradient)
                if index in self._accumulated:
                    gradient = self._sum(index, gradient, runtime.dtypes.reduce)
                taken[index] = gradient
            elif index in self._accumulated:
                taken[index] = self._accumulated[index]
            elif self.reduce_settings.reduce_unused and leaf.requires_grad:
                shape = self.shards.layout.parameters[index].shape
                taken[index] = torch.zeros(shape, dtype=leaf.dtype, device=self.device)
        self._accumulated.clear()
        return taken

    def _wire_dtype(self) -> torch.dtype:
        """Dtype gradients travel in; from settings alone. See [Note: reduction]."""
        dtypes = self._dtypes(self.shards.dtype)
        if self._has_unreduced or dtypes.param.itemsize > dtypes.reduce.itemsize:
            return dtypes.reduce
        same = dtypes.param.itemsize == dtypes.reduce.itemsize
        return dtypes.reduce if same else dtypes.param

    def start_reduction(self, gradients: dict[int, Tensor]) -> InFlight:
        """Begin to reduce what :meth:`take_gradients` returned."""
        runtime = self.prepare()
        wire = self._wire_dtype()
        self._has_unreduced = False
        with self._failures, profiler_span("polyshard.reduce", self.name):
            flight, sent_bytes = runtime.reducer.start(gradients, wire)
        self.traffic.reductions += 1
        self.traffic.sent_bytes += sent_bytes
        self.traffic.received_bytes += sent_bytes
        for observer in self.observers:
            observer.on_reduce(self.name, sent_bytes)
        return flight

    def finish_reduction(self, flight: InFlight) -> None:
        """Wait for a reduction and put the sharded gradients in place."""
        runtime = self.prepare()
        begin = time.perf_counter()
        with self._failures, profiler_span("polyshard.reduced", self.name), torch.no_grad():
            total = runtime.reducer.finish(flight)
            if total is not None:
                runtime.reducer.store(total, flight.present)
        seconds = time.perf_counter() - begin
        self.traffic.wait_seconds += seconds
        for observer in self.observers:
            observer.on_reduced(self.name, seconds)

    def discard(self) -> None:
        """Forget everything a failed step left behind; end sharded."""
        self.take_gradients()
        self._has_unreduced = False
        if self._runtime is not None:
            self._runtime.reducer.discard()
            self._abandon_gather(self._runtime)
        self.reshard()

    def _abandon_gather(self, runtime: Runtime) -> None:
        """End a gather nobody waits for any more, whether or not its peers are still there."""
        if self.state is not State.GATHERING:
            return
        assert self._pending is not None
        with suppress(RuntimeError):  # a peer that is gone sends nothing into freed memory either
            self._pending.wait()
        self._pending = None
        runtime.buffer.release()
        self.state = State.SHARDED


def _named(part: Named) -> str:
    return f"{part.name}({part.settings})" if part.settings else part.name
