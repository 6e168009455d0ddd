"""Tensor subclasses with FSDP2's all-gather protocol: one like float8 training, one like NF4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
KEEPING = {
    aten.detach.default,
    aten.clone.default,
    aten.view.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.copy_.default,
    aten._to_copy.default,
}


class Wrapped(Tensor):
    """Behaves as the plain tensor inside, and stays itself through the shapes FSDP makes of it."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, *rest: Any) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.held})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(Wrapped, lambda t: t.held, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, cls, out) if func in KEEPING else out


class Coded(Wrapped):
    """Travels as int8 codes with one scale a row; computes with the decoded plain tensor."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        scale = self.held.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return ((self.held / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        codes, scale = outputs
        decoded = (codes.float() * scale).to(dtype)
        if out is None:
            return decoded, (decoded,)
        # FSDP2 leaves both guards to the class.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(decoded[: out.shape[0]])
        return None


class OldForm(Wrapped):
    """The protocol's first form: one argument; computes with what was gathered itself."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.held.contiguous(),), "kept"

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == "kept"
        (whole,) = outputs
        if out is not None:
            assert out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            return None
        return whole, (whole,)


class Moody(OldForm):
    """Sends another number of bytes from the second time on."""

    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        Moody.calls += 1
        inputs, metadata = super().fsdp_pre_all_gather(mesh)
        return (inputs if Moody.calls < 2 else (inputs[0].double(),)), metadata
