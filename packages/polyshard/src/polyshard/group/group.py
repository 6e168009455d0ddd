"""One parameter group at run time: unshard, reshard, reduce.

A group is SHARDED (only the shard buffer has memory), GATHERING (a transfer fills the unsharded
buffer) or UNSHARDED (the modules hold the unsharded parameters). Every transition may be asked for
at any time; one that has happened already is a no-op.

[Note: kept parameters]
A root may be told not to free its parameters after backward, blocks stay gathered in evaluation,
and users call ``unshard()``. What is unsharded when an outermost forward starts may therefore be
out of date (see [Note: turns] of the freshness). Every rank compares its own part, and since ranks
gather together they decide together: one all-reduce of a byte a group, in each process group that
has any, and a group that differs on one rank is gathered anew on all. A forward that finds
everything sharded does nothing of this. On an accelerator the answer is waited for.

Between micro-batches nothing is compared. A forward whose backward is not the last of its
iteration, or reduces nothing, *promises* that the shards of what stays unsharded hold still until
an optimizer steps, and so does that backward, which a rank may leave out. Ranks have to agree on
that without a word, so calls of ``step()`` are counted, which are the same on all: values and
version counters differ where a rank has no rows. What is written by hand meanwhile shows in the
first forward that nothing was promised to.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from polyshard._torch.private import in_backward, outside_transforms
from polyshard.errors import LifecycleError, warn
from polyshard.failures import Part
from polyshard.group.dtypes import Dtypes, GradientDtypes, policy_notices, resolve_dtypes
from polyshard.group.generation import Generation, Parts, build_generation
from polyshard.group.gradients import Gradients
from polyshard.memory.pages import PagePool
from polyshard.memory.streams import Lanes, streams_of
from polyshard.params.parameter import Owner, Source, Told
from polyshard.params.protocol_shards import ProtocolShards
from polyshard.params.sharded import Shards
from polyshard.plugins.contributions import GATHER_CODEC, LANDING, OBSERVERS, REDUCE_CODEC
from polyshard.plugins.seams import GroupIdentity, GroupInfo, ParamInfo, ShardStorage, overrides
from polyshard.plugins.stack import PluginStack
from polyshard.program.executor import abandon, new_frame, return_home, run
from polyshard.program.meter import Meter
from polyshard.program.ops import Frame, Program
from polyshard.program.reduce import ReduceSettings
from polyshard.program.tensor_protocol import refuse_block, refuse_claims, uses_protocol
from polyshard.sharding.layout import plan_layout
from polyshard.transport import all_reduce
from polyshard.transport.base import Transport, Turn
from polyshard.transport.custom import CustomComms, CustomTransport

_requires_grad = attrgetter("requires_grad")


class State(Enum):
    """Which form of its parameters a group holds."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class Place:
    """Where a rank is: at which group, in which forward or backward; ``str()`` says it."""

    def __init__(self, group: ParameterGroup) -> None:
        """``group`` may be renamed, and get another turn; it is not kept alive."""
        self._group = weakref.ref(group)

    @override
    def __str__(self) -> str:
        group = self._group()
        if group is None:
            return "a group that is gone"
        turn = group.turn
        number = f"forward {turn.count}"
        if turn.in_backward:
            number = f"the backward of {number}"
        elif not turn.in_forward:
            number = f"no forward, after {number}"
        return f"group '{group.name}' in {number}"


def free_outdated(groups: Iterable[ParameterGroup]) -> None:
    """Reshard those of ``groups``, all unsharded, whose shards changed on any rank."""
    together: dict[tuple[int, ...], list[ParameterGroup]] = {}
    for group in groups:
        together.setdefault(group.roles.shard_ranks, []).append(group)
    for members in together.values():
        for group, is_outdated in zip(members, _outdated(members), strict=True):
            if is_outdated:
                group.reshard()
            else:
                group.vouch()


def _outdated(groups: list[ParameterGroup]) -> list[bool]:
    """Of groups that share their shard axis: which ones differ on any of its ranks."""
    roles, names = groups[0].roles, ", ".join(group.name for group in groups)
    part = Part(names)
    with part, _comparing(part, groups[0], names):
        flags = torch.stack([group.differs().to(group.device) for group in groups])
        flags = flags.to(torch.uint8)
        if roles.shard_size > 1:
            all_reduce(flags, roles.shard_group, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]


def _comparing(part: Part, group: ParameterGroup, names: str) -> AbstractContextManager[object]:
    """Where the host waits for a device, it says for which group."""
    if streams_of(group.device) is None:
        return nullcontext()
    ranks, count = group.roles.shard_ranks, group.turn.count
    return part.handler.waiting(ranks, f"kept/{names}", count, f"a look at what '{names}' kept")


class ParameterGroup:
    """The parameters of a unit that communicate together."""

    def __init__(
        self, sources: Sequence[Source], stack: PluginStack, name: str, block_size: int | None
    ) -> None:
        """Plan a group; nothing changes yet.

        Args:
            sources: its parameters, which share a mesh, a policy and one original dtype.
            stack: the plugins.
            name: what it is called until :meth:`rename`.
            block_size: ranks that together keep the parameters between forward and backward, if
                not all free; see :meth:`set_block`.
        """
        self.roles, self.policy, self.stack = sources[0].placed.roles, sources[0].policy, stack
        self.state, self.identity = State.SHARDED, GroupIdentity(name)
        self.reduces = self.all_reduces = True
        self.reshard_after_backward = self.unshard_in_backward = True
        self.pool: PagePool | None = None
        self.turn, self.lanes, self._reduce_settings = Turn(), Lanes(), ReduceSettings()
        self.block_size, self.device = block_size, self.roles.device
        told = [Told.by(s.parameter) for s in sources]
        dtypes, _ = resolve_dtypes(self.policy, sources[0].value.dtype, told)
        info = self._info_of([s.info for s in sources], dtypes)
        warn(policy_notices(self.policy, dtypes.orig))
        self._teardown = stack.teardown(info)
        self.contributions = stack.contributions(info)
        if uses_protocol(sources):
            refuse_claims(self.contributions, info)
            refuse_block(block_size, info)
        self.reduced: list[frozenset[int]] = []
        """Parameters that had a gradient on any replica, in each reduction of the iteration; for
        a handler of failures, if there is one."""
        self.meter = Meter(self.identity, self.contributions.all(OBSERVERS))
        self._base_transport = self.contributions.transport(info, self.roles)
        self.transport: Transport = self._base_transport
        self.comms = CustomComms()
        layout = plan_layout(
            [s.shape for s in sources],
            self.roles.shard_size,
            info.orig_dtype.itemsize,
            self.transport.staging_bytes,
            self.contributions.owners(info),
            lands=self.contributions[LANDING].lands,
        )
        self.contributions.check_constraints(info, layout)
        self._part = Part(self.identity, Place(self))
        self._sources, self._layout = sources, layout
        self._storage = self.contributions.storage(info, layout)
        self.settles = overrides(self._storage.settle, ShardStorage.settle)
        """Whether its storage copies beside the computation, so that the host has to wait."""
        self.shards: Shards
        self.gradients: Gradients
        self._generation: Generation | None = None
        self._gathering: Frame | None = None
        self._home: Any = None  # the stream that the unsharded memory was taken on, on a device
        self._made, self.made_at_step = 0, 0
        self._frozen_late: set[int] = set()
        """Parameters that were frozen while gradients wait, perhaps of theirs: a codec that leaves
        frozen ones out has to send these once more."""
        self.promised_at_step: int | None = None  # see [Note: kept parameters]
        self._stale, self._is_outdated, self.keeps_memory = True, False, False

    def shard(self) -> Sequence[Source]:
        """Cut the parameters and register their sharded forms; called once, when all plans hold.

        Returns:
            What was cut; not kept here.
        """
        if uses_protocol(self._sources):
            self.shards = ProtocolShards(self._sources, self._layout, self.roles)
        else:
            rest = partial(self.contributions.rested, self._storage)
            self.shards = Shards(self._sources, self._layout, self.roles, self._storage, rest)
        self.gradients = Gradients(self.shards, self.stack.transforms)
        self._originals = [weakref.ref(source.parameter) for source in self._sources]
        sources, self._sources = self._sources, ()  # the full parameters may go now
        return sources

    def index_of(self, original: nn.Parameter) -> int | None:
        """Which of its parameters ``original`` was, until :meth:`take_originals`."""
        found = (i for i, held in enumerate(self._originals) if held() is original)
        return next(found, None)

    def add_owners(self, index: int, owners: tuple[Owner, ...]) -> None:
        """Have modules of other units register the parameter at ``index`` too."""
        self.reshard()
        self.shards.add_owners(index, owners)
        self._stale = self._is_outdated = True

    def users(self) -> set[nn.Module]:
        """Modules that register any of its parameters."""
        return {owner.module for p in self.shards.parameters for owner in p.owners}

    def take_originals(self) -> list[weakref.ref[nn.Parameter]]:
        """What was sharded, parameter by parameter, if it is still alive; forgotten here."""
        originals, self._originals = self._originals, []
        return originals

    def take_settings(self, other: ParameterGroup) -> None:
        """Do as ``other``, whose parameters this group has on another mesh, was told to."""
        self.pool, self.keeps_memory = other.pool, other.keeps_memory
        self.sync(reduces=other.reduces, all_reduces=other.all_reduces)
        self.reshard_after_backward = other.reshard_after_backward
        self.unshard_in_backward = other.unshard_in_backward
        self._reduce_settings = other.reduce_settings
        if other.comms:
            self.set_comms(other.comms)

    # --- plan ---------------------------------------------------------------------------------

    def info(self) -> GroupInfo:
        """The group as plugins see it, with current names, dtypes and frozen parameters."""
        return self._info_of([p.current_info for p in self.shards.parameters], self._dtypes()[0])

    def _info_of(self, parameters: Sequence[ParamInfo], dtypes: Dtypes) -> GroupInfo:
        return GroupInfo(
            identity=self.identity,
            parameters=tuple(parameters),
            mesh=self.roles.mesh,
            rank=self.roles.shard_rank,
            world_size=self.roles.shard_size,
            device=self.device,
            orig_dtype=dtypes.orig,
            param_dtype=dtypes.param,
            reduce_dtype=dtypes.reduce,
        )

    def numbers(self) -> dict[str, float]:
        """What codecs of the group measured, by the names of plugin and number."""
        generation = self._generation
        if generation is None:
            return {}
        gather = generation.__dict__.get("gather")  # none after a conversion, until the next use
        found = self.contributions
        codecs = (
            (found[GATHER_CODEC].name, None if gather is None else gather.codec),
            (found[REDUCE_CODEC].name, generation.reducer.codec),
        )
        return {
            f"{plugin} {name}": float(value)
            for plugin, codec in codecs
            if codec is not None
            for name, value in codec.numbers().items()
        }

    def _dtypes(self) -> tuple[Dtypes, GradientDtypes]:
        told = [p.told for p in self.shards.parameters]
        return resolve_dtypes(self.policy, self.shards.dtype, told)

    @property
    def name(self) -> str:
        """What it is called in plans, reports and errors."""
        return self.identity.text

    def rename(self, name: str, fqns: Mapping[int, str]) -> None:
        """Take the names that the root gives: the unit's, and each parameter's by identity."""
        self.identity.text, self.identity.is_named = name, True
        for parameter in self.shards.parameters:
            fqn = fqns.get(id(parameter.parameter), parameter.info.fqn)
            parameter.info = replace(parameter.info, fqn=fqn)
        # Transfers are tagged with the name, which ranks must agree on.
        self._stale = self._is_outdated = True

    # --- life cycle ---------------------------------------------------------------------------

    def adopt_replaced(self) -> None:
        """Parameters may have been replaced or moved: have them rest in the shard at once.

        What does not fit together yet waits for the next use. See [Note: changing hands].
        """
        self._stale, self.promised_at_step = True, None
        if self.shards.try_adopt_replaced():
            self._is_outdated = True
            if self._generation is not None:
                self._generation.let_go()

    def take_memory(self, device: torch.device) -> None:
        """Have parameters on the meta device rest in memory of ``device``, without values.

        Those that cannot, are left to ``to_empty``.
        """
        if self.shards.take_memory(device):
            self._stale, self._is_outdated, self.promised_at_step = True, True, None

    def prepare(self) -> Generation:
        """Everything the step needs, made on first use and after a conversion."""
        generation = self._generation
        if generation is None or self._stale or self.shards.is_vacant:
            return self._prepare_anew()
        return generation

    @outside_transforms
    @torch.inference_mode(mode=False)
    def _prepare_anew(self) -> Generation:
        """All that is made here outlives the forward, which may run in inference mode or a jvp."""
        if self.is_closed:
            raise LifecycleError(f"group '{self.name}' was closed; shard its model anew.")
        if self.shards.adopt_replaced():
            self._is_outdated = True
        if self._is_outdated or self._generation is None:
            self._generation = self._build()
        self._is_outdated = self._stale = False
        return self._generation

    def _build(self) -> Generation:
        for parameter in self.shards.parameters:
            parameter.hear()
        dtypes, gradients = self._dtypes()
        parts = Parts(
            info=self.info(),
            shards=self.shards,
            roles=self.roles,
            policy=self.policy,
            contributions=self.contributions,
            transport=self.transport,
            transforms=self.stack.transforms,
            pool=self.pool,
            block_size=self.block_size,
            waiting=self.gradients.waiting,
            turn=self.turn,
            dtypes=dtypes,
            gradients=gradients,
            keeps_memory=self.keeps_memory,
            meter=self.meter,
        )
        last = self._generation
        generation = build_generation(parts, last)
        if last is not None:
            self.gradients.carry(last, generation)
        return generation

    def unshard(self) -> None:
        """Begin to gather, unless gathered or on the way; see [Note: kept parameters]."""
        is_sharded = self.state is State.SHARDED
        generation, turn = self._generation, self.turn
        if is_sharded and not (turn.in_backward or in_backward()) and self.shards.have_moved():
            self._stale = True
        if generation is None or self._stale or self.shards.is_vacant:
            generation = self._prepare_anew()
        if not is_sharded and turn.in_backward:
            return
        if not is_sharded and self._stays_unsharded():
            self.sync_requires_grad(generation)
            return
        if self.shards.is_vacant:
            self.shards.check_materialized()
        program, meter = generation.unshard, self.meter
        if generation.block is not None and generation.block.holds:
            program = self._program_of_block(generation)
        if meter.step_observers:
            meter.tell("on_start", "gather")
        # Kept before it runs: should the start raise, `abandon` gives back what it has taken.
        self._gathering = frame = new_frame(program, self.lanes, self.device)
        run(frame, program.cut, self._part, "polyshard.unshard")
        self.state = State.GATHERING  # only now: a start that raised leaves the group sharded
        self.promised_at_step = None
        self._made, self.made_at_step = turn.number, turn.steps  # as in `vouch()`
        traffic, moved = meter.traffic, program.moved
        traffic.gathers += 1
        traffic.sent_bytes += moved.sent
        traffic.received_bytes += moved.received
        if meter.observers:
            meter.tell("on_unshard", moved.sent)

    def _program_of_block(self, generation: Generation) -> Program:
        """Gather from the block if it holds parameters of this turn, else from all shards."""
        assert generation.block is not None
        assert generation.unshard_from_block is not None
        if self.turn.vouches(self._made):
            return generation.unshard_from_block
        generation.block.drop()
        return generation.unshard

    def _stays_unsharded(self) -> bool:
        """Whether nothing is to be gathered; what another turn left is looked at first."""
        if self.state is State.SHARDED:
            return False
        if not self.turn.vouches(self._made):
            self.wait()
            free_outdated([self])
        return not self.is_sharded

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered or on the way."""
        return self.state is State.SHARDED

    @property
    def is_closed(self) -> bool:
        """Whether it can be used no more."""
        return self._teardown.is_done

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is not frozen."""
        return any(p.parameter.requires_grad for p in self.shards.parameters)

    def unsharded_names(self, identities: Set[int]) -> list[str]:
        """Names of the parameters whose unsharded forms are among those with these identities."""
        leaves = () if self._generation is None else self._generation.leaves
        every = zip(self.shards.parameters, leaves, strict=False)
        return [p.info.fqn for p, leaf in every if id(leaf) in identities]

    def differs(self) -> Tensor:
        """Whether this rank's shard is not what is unsharded (a 0-dim bool)."""
        found = self.prepare().gather.differs(self.shards.fetch)
        self.shards.release()
        return found

    def vouch(self) -> None:
        """Take the unsharded parameters for current: they equal the shards on all ranks."""
        self._made, self.made_at_step = self.turn.number, self.turn.steps

    def wait(self) -> None:
        """Finish the gather and register the unsharded parameters."""
        if self.state is not State.GATHERING:
            return
        frame, generation, turn = self._gathering, self._generation, self.turn
        assert frame is not None
        assert generation is not None
        begin = time.perf_counter()
        run(frame, len(frame.program.ops), self._part, "polyshard.wait")
        self._gathering, self._home = None, frame.home
        if self.settles and not (turn.in_forward or turn.in_backward):
            self.settle()  # asked for by hand: the caller may change the shard next
        self.sync_requires_grad(generation)
        self.state, meter = State.UNSHARDED, self.meter
        seconds = time.perf_counter() - begin
        meter.traffic.wait_seconds += seconds
        if meter.observers:
            meter.tell("on_unsharded", seconds)

    def sync_requires_grad(self, generation: Generation) -> None:
        """Have leaves follow the sharded parameters, on which users freeze and unfreeze."""
        waits = self.gradients.has_unreduced or self.gradients.waiting.awaits_replicas
        changed = bool(self._frozen_late) and not waits
        if changed:
            self._frozen_late.clear()
        trained = generation.trained
        pairs = zip(generation.leaves, self.shards.parameters, strict=True)
        for index, (leaf, sharded) in enumerate(pairs):
            if leaf.requires_grad is not trained[index]:  # by a user who found it registered
                sharded.parameter.requires_grad_(leaf.requires_grad)
            wanted = sharded.parameter.requires_grad
            if trained[index] is not wanted:
                if waits and not wanted:
                    self._frozen_late.add(index)
                trained[index] = wanted
                leaf.requires_grad_(wanted)
                changed = True
        if changed:
            info, late = self.info(), self._frozen_late
            parameters = (
                replace(p, requires_grad=True) if index in late else p
                for index, p in enumerate(info.parameters)
            )
            info = replace(info, parameters=tuple(parameters))
            codec = self.contributions.bound(REDUCE_CODEC, info, self.shards.layout)
            generation.reducer.rebind(codec)
            generation.reductions.clear()

    def reshard(self, *, until_backward: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Args:
            until_backward: a backward will come, so the block (if there is one) keeps its slices.
        """
        if self.state is State.GATHERING:
            self.wait()
        generation = self._generation
        if self.state is State.SHARDED or generation is None:
            return
        if until_backward and generation.block is not None:
            generation.block.keep()
        if list(map(_requires_grad, generation.leaves)) != generation.trained:
            self._follow_leaves(generation)
        self.shards.registry.register()
        if self._home is not None:
            return_home(self._home, self.device)
        if not self.keeps_memory:
            generation.buffer.release()
        self.state = State.SHARDED
        if self.meter.observers:
            self.meter.tell("on_reshard")

    def _follow_leaves(self, generation: Generation) -> None:
        """Have sharded parameters be trained as users said of the unsharded ones."""
        pairs = zip(generation.leaves, self.shards.parameters, strict=True)
        for index, (leaf, sharded) in enumerate(pairs):
            if leaf.requires_grad is not generation.trained[index]:
                sharded.parameter.requires_grad_(leaf.requires_grad)
                leaf.requires_grad_(generation.trained[index])  # until the next gather

    def keep_memory(self, keep: bool) -> None:
        """Whether unsharded memory stays where it is when the parameters are freed."""
        self.keeps_memory = keep
        if self._generation is not None and self.is_sharded and not keep:
            self._generation.buffer.release()

    def set_block(self, size: int | None) -> None:
        """Have blocks of ``size`` ranks, or none, keep parameters between forward and backward."""
        if size != self.block_size:
            self.reshard()
            self.drop_block()
            self.block_size = size
            self._stale = self._is_outdated = True
        if size is not None:
            # A backend that splits groups off needs every rank of the world, and a forward may be
            # that of one pipeline stage. So the group is made here, and remembered.
            self.transport.block(size)

    def set_comms(self, comms: CustomComms) -> None:
        """Have the user's own objects move bytes, where there are any and more than one rank."""
        self.reshard()
        self.comms = comms
        self.transport = self._base_transport
        if comms and self.roles.shard_size > 1:
            group = self.roles.shard_group
            self.transport = CustomTransport(self._base_transport, comms, group)
        self._stale = self._is_outdated = True

    def settle(self) -> None:
        """Have the host wait for copies to and from where the shard and its gradient rest."""
        self.shards.storage.settle()

    def drop_block(self) -> None:
        """Free what the block kept for a backward that is over."""
        if self._generation is not None and self._generation.block is not None:
            self._generation.block.drop()

    # --- gradients ----------------------------------------------------------------------------

    @property
    def reduce_settings(self) -> ReduceSettings:
        """What users set of reductions; programs are made anew when it changes."""
        return self._reduce_settings

    @reduce_settings.setter
    def reduce_settings(self, settings: ReduceSettings) -> None:
        self._reduce_settings = settings
        if self._generation is not None:
            self._generation.reductions.clear()

    def sync(self, *, reduces: bool, all_reduces: bool) -> None:
        """Whether backward reduces, over the shard axis and over replicas."""
        self.reduces, self.all_reduces = reduces, all_reduces
        if not reduces:  # on all ranks, whether or not each has a backward then
            self.gradients.has_unreduced = True

    def accumulate(self) -> None:
        """Keep this backward's gradients unsharded for a later reduction."""
        if self._generation is not None:
            self.gradients.accumulate(self._generation)

    def take_gradients(self) -> dict[int, Tensor]:
        """Unsharded gradients by parameter index; the leaves give them up."""
        if self._generation is None:
            return {}
        with_zeros = self._reduce_settings.reduce_unused
        if with_zeros:  # also for what no gather of this step has told of
            self.sync_requires_grad(self._generation)
        return self.gradients.take(self._generation, with_zeros=with_zeros)

    def expects_gradients(self) -> bool:
        """Whether a backward that brought no gradients ends in a reduction nevertheless."""
        if self._generation is None:
            return False
        return self.gradients.are_expected(self._generation, all_reduces=self.all_reduces)

    def start_reduction(self, gradients: dict[int, Tensor], *, is_last: bool) -> Frame:
        """Begin to reduce what :meth:`take_gradients` returned."""
        generation, meter = self._generation, self.meter
        if generation is None or self._stale:
            generation = self._prepare_anew()
        if meter.step_observers:
            meter.tell("on_start", "reduce")
        try:
            wire = self.gradients.reducing(generation, gradients)
            frame = generation.reducer.frame(
                gradients,
                wire,
                self._reduce_settings,
                self.lanes,
                generation.reductions,
                is_last=is_last,
                all_reduces=self.all_reduces,
            )
        except Exception as error:
            self._part.handler.explain(self._part, error)
            raise
        if self._part.is_watched and (summed := generation.reducer.summed(frame)) is not None:
            self.reduced.append(summed)
        run(frame, frame.program.cut, self._part, "polyshard.reduce")
        if frame.table.present:
            moved, traffic = frame.table.traffic[frame.key], meter.traffic
            traffic.reductions += 1
            traffic.sent_bytes += moved.sent
            traffic.received_bytes += moved.received
            if meter.observers:
                meter.tell("on_reduce", moved.sent)
        return frame

    def lacking(self) -> Iterator[str]:
        """Names of trainable parameters without a gradient, of each reduction of the iteration."""
        wanted = [i for i, p in enumerate(self.shards.parameters) if p.parameter.requires_grad]
        for summed in self.reduced or [frozenset[int]()]:
            if len(summed) < len(wanted):
                yield from (self.shards.parameters[i].info.fqn for i in wanted if i not in summed)

    def free_sent(self, frame: Frame) -> None:
        """Free what a reduction sent, while the rest of it continues, to be finished later."""
        program = frame.program
        run(frame, program.cut + program.early, self._part, "polyshard.reduced")

    def finish_reduction(self, frame: Frame) -> None:
        """Wait for a reduction and put the sharded gradients in place.

        Raises:
            GradientMismatchError: on every rank, where they have gradients of other parameters.
        """
        begin = time.perf_counter()
        with torch.no_grad():
            run(frame, len(frame.program.ops), self._part, "polyshard.reduced")
        if frame.has_placed or frame.key.has_rows:  # else only messages went around
            seconds, meter = time.perf_counter() - begin, self.meter
            meter.traffic.wait_seconds += seconds
            if meter.observers:
                meter.tell("on_reduced", seconds)

    def place_held(self) -> None:
        """Put gradients in place that wait for a last backward which did not reach this group."""
        with self._part, torch.no_grad():
            is_placed = self.prepare().reducer.place_held()
        if is_placed:
            self.meter.tell("on_reduced", 0.0)

    def discard(self) -> None:
        """Forget everything a failed step left behind; end sharded."""
        if self._generation is not None:
            self.gradients.discard(self._generation)
            self.gradients.has_unreduced = not self.reduces
        self.reduced.clear()
        self.abandon()

    def abandon(self) -> None:
        """End sharded, whatever is under way."""
        frame, self._gathering = self._gathering, None
        if frame is not None:  # peers may be gone, and nothing waits for it any more
            abandon(frame)
            if not (self._generation is None or self.keeps_memory or frame.is_torn):
                self._generation.buffer.release()
            self.state = State.SHARDED
        self.reshard()
        self.drop_block()

    def close(self) -> None:
        """Have plugins let go of what they made for it. It can be used no more."""
        self.discard()
        self._generation, self._stale = None, True
        self._teardown.run()
