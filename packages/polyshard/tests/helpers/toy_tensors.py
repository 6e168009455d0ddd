"""Tensor subclasses with FSDP2's all-gather protocol: one like float8 training, one like NF4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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


def local_part(out: Tensor) -> Tensor:
    """FSDP2 hands over the unsharded parameter, with tensor parallelism a ``DTensor``."""
    return out._local_tensor if isinstance(out, DTensor) else out


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
        out = local_part(out)
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
            out = local_part(out)
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


class Nibbles(Tensor):
    """Holds two 4-bit codes a byte and one scale a row, like NF4; frozen, travels packed."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        shape = (codes.shape[0], 2 * codes.shape[1])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Nibbles({tuple(self.shape)})"

    @classmethod
    def pack(cls, values: Tensor) -> Any:
        """Round ``values`` to 15 levels a row."""
        scales = values.abs().amax(1, keepdim=True).clamp_min(1e-12) / 7
        codes = ((values / scales).round() + 8).to(torch.uint8)
        return cls(codes[:, ::2] << 4 | codes[:, 1::2], scales)

    def unpack(self) -> Tensor:
        return _unpacked(self.codes, self.scales)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(first.codes), func(first.scales))
        if func is aten.slice.Tensor:
            assert args[1] == 0, "rows only"
            return cls(func(first.codes, *args[1:]), func(first.scales, *args[1:]))
        if func is aten.split.Tensor:
            parts = zip(func(first.codes, *args[1:]), func(first.scales, *args[1:]), strict=True)
            return [cls(*part) for part in parts]
        if func is aten.new_zeros.default:
            rows, columns = args[1]
            codes = first.codes.new_zeros(rows, columns // 2)
            return cls(codes, first.scales.new_zeros(rows, 1))
        if func is aten.copy_.default:
            first.codes.copy_(args[1].codes)
            first.scales.copy_(args[1].scales)
            return first
        if func in (aten.view.default, aten.as_strided.default):
            assert tuple(args[1]) in (tuple(first.shape), (-1,)), "shape stays"
            return cls(first.codes, first.scales)
        raise NotImplementedError(f"Nibbles: {func}")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.codes, self.scales), tuple(outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        whole = _unpacked(*outputs)[: metadata[0]].to(dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def _unpacked(codes: Tensor, scales: Tensor) -> Tensor:
    pairs = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
    return (pairs.float() - 8) * scales


class Asking(OldForm):
    """Remembers the meshes it was handed."""

    def __init__(self, inner: Tensor) -> None:
        super().__init__(inner)
        self.meshes: list[Any] = []

    scale: float | None = None

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        self.meshes.append(mesh)
        (held,), metadata = super().fsdp_pre_all_gather(mesh)
        return (held if self.scale is None else held * self.scale,), metadata


class Careless(Wrapped):
    """Pads by itself, travels in bfloat16, and fills ``out`` with everything that arrives."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        rows = -(-outer_size[0] // mesh.size())
        sent = self.held.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        sent[: self.held.shape[0]].copy_(self.held)
        return (sent,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        (whole,) = outputs
        if out is None:
            wide = whole.to(dtype)
            return wide, (whole, wide)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None
