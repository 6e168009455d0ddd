"""Parameter transforms with their adapters, right and wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, ParamInfo, StateDictAdapter
from samples.verdict import Right, Samples, Wrong


class Untransposing(StateDictAdapter):
    """Saves matrices as modules know them."""

    name = "sample"

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return value.transpose(0, 1) if value.ndim == 2 else value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return self.on_save(param, value)


class Unadapted(Plugin):
    """Shards matrices transposed, and saves them so."""

    name = "sample"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.transpose(0, 1), "transposed") if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        assert param_extension == "transposed"
        return tensor.transpose(0, 1)


class Transposing(Unadapted):
    """Shards matrices transposed, and keeps checkpoints as they are without."""

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter:
        return Untransposing()


class Squeezing(StateDictAdapter):
    name = "sample"

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return value.squeeze(-1) if value.ndim == 3 else value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return value.unsqueeze(-1) if value.ndim == 2 else value


class Unsqueezing(Plugin):
    """Shards matrices with one more dim."""

    name = "sample"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.unsqueeze(-1), "one more") if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.squeeze(-1)

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter:
        return Squeezing()


class Abstaining(Unadapted):
    """Has nothing to do with parameters of fewer than four dims."""

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return None


class Wrapping(Plugin):
    """Counts what another plugin flattens."""

    name = "sample"

    def __init__(self) -> None:
        self.inner = Transposing()
        self.calls = 0

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        self.calls += 1
        return self.inner.pre_flatten_transform(tensor)

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return self.inner.post_unflatten_transform(tensor, param_extension)

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter:
        return self.inner.polyshard_state_dict_adapter(group)


# Wrong -------------------------------------------------------------------------------------------


class Copying(Transposing):
    """Unflattens into new memory."""

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.transpose(0, 1).contiguous()


class Kept(Transposing):
    """Does not undo what it did."""

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor


class Doubled(Transposing):
    """Undoes it, but for the values."""

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.transpose(0, 1).mul_(2)


class Widening(Transposing):
    """Flattens to another dtype."""

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.double(), "double") if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.float()


class SomeRanks(Transposing):
    """Flattens on one rank only."""

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        if dist.is_initialized() and dist.get_rank() > 0:
            return None
        return super().pre_flatten_transform(tensor)


class _Doubling(Untransposing):
    """Stores twice the values."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return 2 * super().on_save(param, value)

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return super().on_save(param, value) / 2


class Doubling(Transposing):
    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter:
        return _Doubling()


class _OtherState(Untransposing):
    """Saves the parameter in its saved layout, and its optimizer state in the other."""

    def on_save_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        return value

    def on_load_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        return value


class OtherState(Transposing):
    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> StateDictAdapter:
        return _OtherState()


SAMPLES = Samples(
    right=[Right(Transposing), Right(Unsqueezing), Right(Abstaining), Right(Wrapping)],
    wrong=[
        Wrong(Copying, "test_transforms_are_undone"),
        Wrong(Kept, "test_transforms_are_undone"),
        Wrong(Doubled, "test_transforms_are_undone"),
        Wrong(Widening, "test_transforms_are_undone"),
        Wrong(SomeRanks, "test_two_ranks_train_like_without"),
        Wrong(Unadapted, "test_checkpoints_are_native"),
        Wrong(Doubling, "test_checkpoints_are_native"),
        Wrong(OtherState, "test_checkpoints_are_native"),
    ],
)
