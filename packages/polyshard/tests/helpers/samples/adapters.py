"""State-dict adapters, right and wrong."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, ParamInfo, StateDictAdapter
from samples.verdict import Right, Samples, Wrong, variant


class Same(StateDictAdapter):
    """Saves what there is."""

    name = "sample"

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return value


class Upgrade(Same):
    """Reads what an earlier release saved in half precision."""

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return value.float() if value.dtype == torch.bfloat16 else value


class Around(Same):
    """Counts what another adapter does."""

    def __init__(self) -> None:
        self.inner = Upgrade()
        self.saved: list[str] = []

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        self.saved.append(param.fqn)
        return self.inner.on_save(param, value)

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return self.inner.on_load(param, value)


class Adapting(Plugin):
    name = "sample"
    adapter: ClassVar[Any] = Same

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter | None:
        made: StateDictAdapter | None = self.adapter() if self.adapter else None
        return made


# Wrong -------------------------------------------------------------------------------------------


class _Doubling(Same):
    """Stores twice the values."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return 2 * value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return value / 2


class _OneWay(Same):
    """Changes the sign and does not change it back."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return -value


class _Rounding(Same):
    """Stores fewer bits."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return value.bfloat16().float()


class _Clearing(Same):
    """Changes the parameter that it saves."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        kept = value.clone()
        value.zero_()
        return kept


class _SomeRanks(Same):
    """Stores something else on one rank."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        shift = 0.0 if not dist.is_initialized() else float(dist.get_rank())
        return value + shift

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        shift = 0.0 if not dist.is_initialized() else float(dist.get_rank())
        return value - shift


class _OtherState(Same):
    """Saves optimizer state with another sign."""

    def on_save_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        return -value

    def on_load_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        return -value


SAMPLES = Samples(
    right=[
        Right(Adapting),
        Right(variant(Adapting, "Upgrading", adapter=Upgrade)),
        Right(variant(Adapting, "Wrapping", adapter=Around)),
        Right(variant(Adapting, "Abstaining", adapter=None)),
    ],
    wrong=[
        Wrong(variant(Adapting, "Doubling", adapter=_Doubling), "test_checkpoints_are_native"),
        Wrong(variant(Adapting, "OneWay", adapter=_OneWay), "test_adapters_undo_what_they_do"),
        Wrong(variant(Adapting, "Rounding", adapter=_Rounding), "test_adapters_undo_what_they_do"),
        Wrong(variant(Adapting, "Clearing", adapter=_Clearing), "test_adapters_undo_what_they_do"),
        Wrong(variant(Adapting, "SomeRanks", adapter=_SomeRanks), "test_checkpoints_are_native"),
        Wrong(variant(Adapting, "OtherState", adapter=_OtherState), "test_checkpoints_are_native"),
    ],
)
