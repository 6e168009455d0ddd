"""The frozen description of a group: what it holds, what travels, and who takes part.

A plan is text and numbers only. All ranks compare its lines before the first collective, and
``describe()`` shows the same lines to a person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from polyshard.group.dtypes import Dtypes
from polyshard.group.transfers import Way
from polyshard.plugins.contributions import GATHER_CODEC
from polyshard.plugins.seams import ParamInfo
from polyshard.program.ops import ProgramPlan
from polyshard.sharding.layout import GroupLayout


@dataclass(frozen=True)
class Roles:
    """Which part takes each role for a group: names with settings, equal on all ranks."""

    transport: str
    exclusive: Mapping[str, str]
    """What takes each exclusive role, by the role's name, in the order of the table of roles."""
    plugins: tuple[str, ...] = ()
    watching: tuple[str, ...] = ()
    """Plugins that only look on, which ranks need not have alike."""
    constraints: tuple[str, ...] = ()
    """Each with the elements it keeps together, by parameter."""
    adapters: tuple[str, ...] = ()

    @property
    def gather_codec(self) -> str:
        """What travels in all-gathers."""
        return self.exclusive[GATHER_CODEC.name]

    @property
    def summary(self) -> str:
        """The transport, and all roles."""
        taken = (f"{role} {part}" for role, part in self.exclusive.items())
        return ", ".join((f"transport {self.transport}", *taken))

    @property
    def extras(self) -> tuple[str, ...]:
        """What plugins add beside the exclusive roles."""
        constraints = (f"constraint {text}" for text in self.constraints)
        return (*constraints, *(f"state-dict adapter {text}" for text in self.adapters))


@dataclass(frozen=True)
class Payloads:
    """Bytes a codec sends to each peer; ``None`` where the engine's own transfer is used."""

    gather: int | None
    reduce: int | None
    replicas: int | None

    @override
    def __str__(self) -> str:
        """The text that ranks compare."""
        texts = (("gather", self.gather), ("reduce", self.reduce), ("replicas", self.replicas))
        return ", ".join(f"{name} {'native' if n is None else n}" for name, n in texts)


@dataclass(frozen=True)
class GroupPlan:
    """One parameter group. Sizes are per rank unless a name says otherwise."""

    name: str
    parameters: tuple[ParamInfo, ...]
    layout: GroupLayout
    mesh: str
    dtypes: Dtypes
    roles: Roles
    reshard_after_forward: bool | int
    """Freed after forward, kept, or kept once by each block of so many ranks."""
    programs: tuple[ProgramPlan, ...]
    """What is run to gather (from all shards; from a block, if there is one) and to reduce:
    :func:`polyshard.describe` with ``programs=True`` shows it, and ranks compare it."""
    ways: tuple[Way, ...]
    """How each parameter travels in an all-gather, and why; gradients take the mirrored way."""
    transfers: str
    """The ways in one line, with where their threshold comes from."""
    forms: tuple[str, ...]
    """What each parameter is between steps, beside its shape, as ranks compare it."""
    payloads: Payloads
    notices: tuple[str, ...] = ()
    """Settings that change nothing for this group."""
    accumulated_reduce_bytes: int = 0
    """Bytes this rank sends in one reduce-scatter of sums of several backwards, which travel in the
    reduce dtype."""
    kept_bytes: int = 0
    """Memory of sums of gradients that a codec keeps between backwards of a step, at most."""
    unshard_in_backward: bool = True
    """Whether a backward gathers what was freed after forward."""
    gather_kept_bytes: int = 0
    """Memory that gathers keep all the time, such as rows that a codec decodes to."""

    @property
    def gather(self) -> ProgramPlan:
        """The gather in forward."""
        return self.programs[0]

    @property
    def regather(self) -> ProgramPlan:
        """The gather in backward of parameters that were freed after forward."""
        return self.programs[-2]

    @property
    def reduction(self) -> ProgramPlan:
        """The reduction of all trainable parameters, at the end of an iteration."""
        return self.programs[-1]

    @property
    def gather_bytes(self) -> int:
        """Bytes this rank sends in one all-gather."""
        return self.gather.traffic.sent

    @property
    def regather_bytes(self) -> int:
        """Bytes this rank sends to gather again in backward, if freed after forward."""
        return self.regather.traffic.sent

    @property
    def reduce_bytes(self) -> int:
        """Bytes this rank sends in one reduce-scatter of all trainable parameters."""
        return self.reduction.traffic.sent

    @property
    def numel(self) -> int:
        """Elements of all full parameters."""
        return sum(p.numel for p in self.layout.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """Memory the unsharded parameters take while gathered."""
        return self.layout.unsharded_numel * self.dtypes.param.itemsize

    @property
    def shard_bytes(self) -> int:
        """Memory of the shard at rest."""
        return self.layout.shard_numel * self.dtypes.orig.itemsize

    @property
    def owners(self) -> tuple[int | None, ...]:
        """The rank on which each parameter's gradient lands whole, or is gathered, if it is."""
        return self.layout.owners or (None,) * len(self.parameters)

    def lines(self) -> tuple[str, ...]:
        """Everything that must be equal on the ranks of the data-parallel mesh, one fact a line."""
        layout = tuple(
            f"group {self.name}: layout of {info.fqn} {placed.shape} {way.kind} at "
            f"{placed.shard_offset}{_landing(owner, lands=self.layout.lands)}"
            for info, placed, way, owner in zip(
                self.parameters, self.layout.parameters, self.ways, self.owners, strict=True
            )
        )
        payloads = f"group {self.name}: payload bytes {self.payloads}"
        return (*self.shared_lines(), payloads, *layout)

    def program_lines(self) -> tuple[str, ...]:
        """What is run, which must be equal on all ranks of the data-parallel mesh."""
        return tuple(
            f"group {self.name}: {line}"
            for program in self.programs
            for line in program.lines(own=False)
        )

    def shared_lines(self) -> tuple[str, ...]:
        """What must be equal on all ranks of the model, however other axes cut its parameters."""
        roles, start = self.roles, f"group {self.name}:"
        head = (
            f"{start} mesh {self.mesh}",
            f"{start} dtypes (rest / compute / reduce) {self.dtypes}",
            f"{start} {roles.summary}",
            f"{start} reshard after forward {self.reshard_after_forward}",
        )
        plugins = tuple(f"{start} plugin {line}" for line in roles.plugins)
        extras = tuple(f"{start} {text}" for text in roles.extras)
        parameters = tuple(
            f"{start} parameter {info.fqn} {info.shape} dim {placed.dim} "
            + " ".join(("trainable" if info.requires_grad else "frozen", form, *info.facts))
            for info, placed, form in zip(
                self.parameters, self.layout.parameters, self.forms, strict=True
            )
        )
        return (*head, *plugins, *extras, *parameters)


def _landing(owner: int | None, *, lands: bool) -> str:
    which = "whole" if lands else "gathered"
    return "" if owner is None else f", gradient {which} on rank {owner} of the mesh"
