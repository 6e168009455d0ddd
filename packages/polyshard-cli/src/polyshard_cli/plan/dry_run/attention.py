"""Attention as accelerators do it: memory for its inputs, its output and a row of sums.

On the meta device torch would decompose it into products that hold all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from polyshard_cli.plan.dry_run.recorder import Recorder


class _Attention(torch.autograd.Function):
    """Shapes of attention that recomputes its scores in backward."""

    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, recorder: Recorder) -> Tensor:
        recorder.attention(query, key, value, 2)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.recorder = recorder
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.recorder.attention(query, key, value, 5)
        made = [torch.empty_like(t) for t in (query, key, value)]
        return *made, None


class FlashAttention(TorchFunctionMode):
    """Has ``scaled_dot_product_attention`` be booked on ``recorder`` instead."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        inputs = (given["query"], given["key"], given["value"])
        return _Attention.apply(*inputs, self._recorder)  # type: ignore[no-untyped-call]
