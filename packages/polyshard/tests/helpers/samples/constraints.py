"""Sharding constraints, right and wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, ParamInfo, ShardingConstraint
from samples.verdict import Right, Samples, Wrong, variant


class Rows(ShardingConstraint):
    """Keeps rows whole."""

    name = "sample"

    def __init__(self, group: GroupInfo) -> None:
        self.group = group

    def block_elements(self, param: ParamInfo) -> int:
        return max(param.shape[-1], 1) if len(param.shape) == 2 else 1


class Anything(Rows):
    def block_elements(self, param: ParamInfo) -> int:
        return 1


class Around(Rows):
    """Counts what another constraint is asked."""

    def __init__(self, group: GroupInfo) -> None:
        super().__init__(group)
        self.inner, self.asked = Rows(group), 0

    def block_elements(self, param: ParamInfo) -> int:
        self.asked += 1
        return self.inner.block_elements(param)


class Constraining(Plugin):
    name = "sample"
    constraint: ClassVar[Any] = Rows

    @hookimpl
    def polyshard_sharding_constraint(self, group: GroupInfo) -> ShardingConstraint | None:
        made: ShardingConstraint | None = self.constraint(group) if self.constraint else None
        return made


# Wrong -------------------------------------------------------------------------------------------


class _ByRank(Rows):
    def block_elements(self, param: ParamInfo) -> int:
        return 1 + self.group.rank


class _Nothing(Rows):
    def block_elements(self, param: ParamInfo) -> int:
        return 0


class _Half(Rows):
    def block_elements(self, param: ParamInfo) -> Any:
        return 0.5


class _Wavering(Rows):
    """Says another number whenever it is asked."""

    asked = 0

    def block_elements(self, param: ParamInfo) -> int:
        _Wavering.asked += 1
        return _Wavering.asked


class _Addressed(Rows):
    """Shows where it lies in memory, which differs between ranks."""

    @property
    def settings(self) -> str:
        return repr(self)


ANSWERS = "test_answers_are_the_same_on_every_rank"
SAMPLES = Samples(
    right=[
        Right(Constraining),
        Right(variant(Constraining, "Free", constraint=Anything)),
        Right(variant(Constraining, "Wrapping", constraint=Around)),
        Right(variant(Constraining, "Abstaining", constraint=None)),
    ],
    wrong=[
        Wrong(variant(Constraining, "ByRank", constraint=_ByRank), ANSWERS),
        Wrong(variant(Constraining, "Nothing", constraint=_Nothing), ANSWERS),
        Wrong(variant(Constraining, "Half", constraint=_Half), ANSWERS),
        Wrong(variant(Constraining, "Wavering", constraint=_Wavering), ANSWERS),
        Wrong(variant(Constraining, "Addressed", constraint=_Addressed), ANSWERS),
    ],
)
