"""Other forms of a parameter, undone without a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import ParamInfo


class Flattening(Plugin):
    """Shards each matrix as a flat vector: a view, so that it can be undone without a copy."""

    name = "flattening"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.reshape(-1), tensor.shape) if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.view(param_extension)


class Transposing(Plugin):
    """Shards each matrix transposed. Comes before or after ``flattening`` as told."""

    name = "transposing"

    def __init__(self, before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
        self.before = before  # type: ignore[misc]
        self.after = after  # type: ignore[misc]
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any]:
        if tensor.ndim < 2:
            return tensor, None
        name = param.fqn if param is not None else "?"  # FSDP1 does not say
        self.seen.append((name, tuple(tensor.shape)))
        return tensor.transpose(0, -1), "transposed"

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        assert param_extension == "transposed"
        return tensor.transpose(0, -1)


class Unsqueezing(Plugin):
    """Shards each matrix with one more dim at the end."""

    name = "unsqueezing"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        return (tensor.unsqueeze(-1), tensor.ndim) if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        assert tensor.ndim == param_extension + 1
        return tensor.squeeze(-1)
