"""The local part of a ``DTensor`` all of whose rows lie with one rank.

[Note: whole rows]
torch's norms, sums and pointwise operations on a ``DTensor`` compute with local parts and combine
the results, whatever rows these are. Everything else counts on rows in their places: it would pad
and cut, and return other values than it should. So the local part is a tensor that computes
pointwise and by norms, and refuses the rest, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from polyshard.errors import UnsupportedError

_NAMES = frozenset(
    {
        "_amp_foreach_non_finite_check_and_unscale_", "_local_scalar_dense", "_to_copy", "alias",
        "all", "amax", "amin", "any", "clone", "count_nonzero", "detach", "empty_like", "isfinite",
        "linalg_vector_norm", "max", "min", "norm", "ones_like", "sum", "zero_", "zeros_like",
    }
)  # fmt: skip


class WholeRows(Tensor):
    """See [Note: whole rows]; ``whole`` is the plain tensor, empty on ranks without rows."""

    whole: Tensor
    writes: int
    """Counts them: below this class torch does not."""

    @staticmethod
    def __new__(cls, whole: Tensor) -> WholeRows:
        """A wrapper without memory of its own."""
        made: WholeRows = Tensor._make_wrapper_subclass(
            cls,
            whole.size(),
            strides=whole.stride(),
            storage_offset=0,
            dtype=whole.dtype,
            layout=whole.layout,
            device=whole.device,
            requires_grad=False,
        )
        made.whole, made.writes = whole, 0
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WholeRows({self.whole!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name: str = func.overloadpacket.__name__
        is_pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
        same = name in {"view", "_unsafe_view"} and tuple(args[1]) == tuple(args[0].shape)
        if func.namespace != "aten" or not (is_pointwise or same or name in _NAMES):
            raise UnsupportedError(
                f"{func} was asked of a gradient that landed whole on one rank: its rows are not "
                "in their places. Norms, clipping and scaling take it; to read it, ask the plugin "
                "that had it land there, or leave the parameter out of it."
            )
        given, named = tree_map_only(WholeRows, lambda t: t.whole, (tuple(args), kwargs or {}))
        if "norm" in name:
            given = _without_empty(given, named)
        result = func(*given, **named)
        if func._schema.is_mutable:
            for one in _found(args):
                one.writes += 1
        if result is None or name.endswith("_"):
            return result if result is None else args[0]
        shapes = {t.shape for t in _found(args) if t.ndim}
        return tree_map_only(Tensor, lambda t: cls(t) if t.shape in shapes else t, result)


def _found(args: Sequence[Any]) -> list[WholeRows]:
    flat = [one for a in args for one in (a if isinstance(a, (list, tuple)) else (a,))]
    return [one for one in flat if isinstance(one, WholeRows)]


def _without_empty(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a norm in which empty tensors are such as change no norm: infinite orders."""
    order = given[1] if len(given) > 1 else named.get("ord", 2.0)
    if not isinstance(order, (int, float)) or not math.isinf(order):
        return given
    fill = 0.0 if order > 0 else math.inf
    swapped = tree_map_only(Tensor, lambda t: t if t.numel() else t.new_full((1,), fill), given[0])
    return (swapped, *given[1:])
