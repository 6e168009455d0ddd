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
from functools import partial

import torch
from torch import Tensor

from polyshard._torch_private import profiler_span
from polyshard.bound import Binding
from polyshard.constraints import check_constraints
from polyshard.failures import FailureReport
from polyshard.fit import fitting
from polyshard.gather import GatherPath
from polyshard.gradients import Gradients
from polyshard.layout import plan_layout
from polyshard.mesh import MeshRoles
from polyshard.notices import policy_notices, warn
from polyshard.pages import PagePool
from polyshard.parameter import Source
from polyshard.plan import GroupPlan, resolve_dtypes
from polyshard.planner import plan_group
from polyshard.policies import MixedPrecisionPolicy
from polyshard.protocol import (
    ProtocolShards,
    refuse_block,
    refuse_claims,
    uses_protocol,
)
from polyshard.reduction import InFlight, ReduceSettings
from polyshard.runtime import Parts, Runtime, build_runtime
from polyshard.seams import GroupInfo, ParamInfo, ShardStorage, Stack
from polyshard.shards import Shards
from polyshard.traffic import Meter
from polyshard.transport.base import Pending, Transport
from polyshard.transport.custom import CustomComms, CustomTransport


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
    block_size: int | None = None
    """Ranks that together keep the parameters between forward and backward, if not all free."""


class ParameterGroup:
    """The parameters of a unit that communicate together."""

    def __init__(self, sources: Sequence[Source], setup: GroupSetup) -> None:
        """Plan a group of ``sources``, which share one original dtype; nothing changes yet."""
        self.setup = setup
        self.name = setup.name
        self.roles = setup.roles
        self.state = State.SHARDED
        self.reduces = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.reduce_settings = ReduceSettings()
        self.pool: PagePool | None = None
        self.block_size = setup.block_size
        self.device = setup.roles.device
        info = self._info(tuple(s.info for s in sources), sources[0].value.dtype)
        warn(policy_notices(setup.policy, info.orig_dtype))
        self.contributions = setup.stack.contributions(info)
        if uses_protocol(sources):
            refuse_claims(self.contributions, info)
            refuse_block(setup.block_size, info)
        self.meter = Meter(self.contributions.observers)
        resting = self.contributions.storage
        binding = Binding(self.contributions, self.name)
        self._base_transport = binding.transport(setup.roles, self.device)
        warn(getattr(self.contributions.backend, "notices", ()))
        self._transport: Transport = self._base_transport
        self._comms = CustomComms()
        layout = plan_layout(
            [s.shape for s in sources],
            setup.roles.shard_size,
            info.orig_dtype.itemsize,
            self._transport.staging_bytes,
        )
        check_constraints(binding, info, layout)
        self._failures = FailureReport(setup.roles.ranks, self.name)
        self._sources: Sequence[Source] = sources
        self._layout = layout
        storage = resting.create(info, layout)
        self._storage = fitting(storage, ShardStorage, resting, "create")
        self.shards: Shards
        self.gradients: Gradients
        self._runtime: Runtime | None = None
        self._path: GatherPath | None = None
        self._pending: Pending | None = None
        self._gathered_versions: list[int] = []
        self._stale = True

    def shard(self) -> None:
        """Cut the parameters and register their sharded forms; called once, when all plans hold."""
        if uses_protocol(self._sources):
            self.shards = ProtocolShards(self._sources, self._layout, self.roles)
        else:
            rest = partial(Binding(self.contributions, self.name).rested, self._storage)
            self.shards = Shards(self._sources, self._layout, self.roles, self._storage, rest)
        self.gradients = Gradients(self.shards, self.setup.stack.onion, self.reduce_settings)
        self._sources = ()  # the full parameters may go now

    # --- plan ---------------------------------------------------------------------------------

    def info(self) -> GroupInfo:
        """The group as plugins see it, with current names, dtypes and frozen parameters."""
        return self._info(tuple(p.current_info for p in self.shards.parameters), self.shards.dtype)

    def _info(self, parameters: tuple[ParamInfo, ...], orig: torch.dtype) -> GroupInfo:
        dtypes = resolve_dtypes(self.setup.policy, orig)
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
        runtime = self.prepare()
        self._sync_requires_grad(runtime)
        return plan_group(self, runtime)

    @property
    def transport(self) -> Transport:
        """How bytes move: the backend's way, or the user's own objects over it."""
        return self._transport

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
            block_size=self.block_size,
        )
        runtime = build_runtime(parts, resolve_dtypes(self.setup.policy, self.shards.dtype))
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
            self._path = self._choose_path(runtime)
            if self._path is runtime.path:
                self._gathered_versions = self.shards.versions()
            self._pending = self._path.start(self.shards.fetch)
        self.state = State.GATHERING  # only now: a start that raised leaves the group sharded
        self.meter.gather_started(self.name, self._path.sent_bytes, self._path.received_bytes)

    def _choose_path(self, runtime: Runtime) -> GatherPath:
        """From the block if it holds what the shards still say, else from all shards."""
        block = runtime.block
        if block is None or not block.holds:
            return runtime.path
        if self._shards_changed():
            block.drop()
            return runtime.path
        return block

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
        assert self._path is not None
        begin = time.perf_counter()
        with self._failures, profiler_span("polyshard.wait", self.name):
            self._pending.wait()
            self._path.finish()
        self._pending = None
        if self._path is runtime.path:
            self.shards.release()
        self._sync_requires_grad(runtime)
        runtime.registry.register()
        self.state = State.UNSHARDED
        self.meter.gathered(self.name, time.perf_counter() - begin)

    def _sync_requires_grad(self, runtime: Runtime) -> None:
        """Freezing and unfreezing happens on the sharded parameter; the leaf follows."""
        changed = False
        for sharded, leaf in zip(self.shards.parameters, runtime.leaves, strict=True):
            wanted = sharded.parameter.requires_grad
            if leaf.requires_grad is not wanted:
                leaf.requires_grad_(wanted)
                changed = True
        if changed:
            binding = Binding(self.contributions, self.name)
            runtime.reducer.rebind(binding.reduce_codec(self.info(), self.shards.layout))

    def reshard(self, *, until_backward: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Args:
            until_backward: a backward will come, so the block (if there is one) keeps its slices.
        """
        if self.state is State.GATHERING:
            self.wait()
        if self.state is State.SHARDED or self._runtime is None:
            return
        block = self._runtime.block
        with profiler_span("polyshard.reshard", self.name):
            if until_backward and block is not None:
                block.keep()
            self.shards.registry.register()
            self._runtime.buffer.release()
        self.state = State.SHARDED
        self.meter.resharded(self.name)

    def set_block(self, size: int | None) -> None:
        """Have ``size`` ranks (``None``: none) keep the parameters between forward and backward."""
        if self.block_size != size:
            self.reshard()
            self.drop_block()
            self.block_size = size
            self._runtime = None

    def set_comms(self, comms: CustomComms) -> None:
        """Have the user's own objects move bytes, where there are any and more than one rank."""
        self.reshard()
        self._comms = comms
        self._transport = self._base_transport
        if comms and self.roles.shard_size > 1:
            group = self.roles.shard_group
            self._transport = CustomTransport(self._base_transport, comms, group)
        self._runtime = None

    @property
    def comms(self) -> CustomComms:
        """The user's own communication objects."""
        return self._comms

    def separate_reductions(self, enable: bool) -> None:
        """Whether reductions get a communicator of their own."""
        self._transport.separate_reductions(enable)

    def drop_block(self) -> None:
        """Free what the block kept for a backward that is over."""
        if self._runtime is not None and self._runtime.block is not None:
            self._runtime.block.drop()

    # --- gradients ----------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Keep this backward's gradients unsharded for a later reduction."""
        if self._runtime is not None:
            self.gradients.accumulate(self._runtime)

    def take_gradients(self) -> dict[int, Tensor]:
        """Unsharded gradients by parameter index; the leaves give them up."""
        return {} if self._runtime is None else self.gradients.take(self._runtime)

    def start_reduction(self, gradients: dict[int, Tensor]) -> InFlight:
        """Begin to reduce what :meth:`take_gradients` returned."""
        runtime = self.prepare()
        with self._failures, profiler_span("polyshard.reduce", self.name):
            flight, sent_bytes = self.gradients.start(runtime, gradients)
        self.meter.reduction_started(self.name, sent_bytes)
        return flight

    def finish_reduction(self, flight: InFlight) -> None:
        """Wait for a reduction and put the sharded gradients in place."""
        runtime = self.prepare()
        begin = time.perf_counter()
        with self._failures, profiler_span("polyshard.reduced", self.name), torch.no_grad():
            total = runtime.reducer.finish(flight)
            if total is not None:
                runtime.reducer.store(total, flight.present)
        self.meter.reduced(self.name, time.perf_counter() - begin)

    def discard(self) -> None:
        """Forget everything a failed step left behind; end sharded."""
        if self._runtime is not None:
            self.gradients.discard(self._runtime)
            self._abandon_gather(self._runtime)
        self.reshard()
        self.drop_block()

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
