"""Which stored elements a tensor is made of: code makes it of tensors without values.

Files of weights may hold a tensor in other pieces than a model does: experts apart or stacked, gate
and up projections apart or together, heads in another order. The code that converts one form to the
other is a library's. It is called with :class:`Traced` tensors, which have no values but remember
where each element comes from, so that a rank can read, or write, only the elements that it holds.
That works for code that moves elements (``cat``, ``stack``, ``chunk``, ``transpose``, ``view``,
...); arithmetic is an error.

Views are tensors on the meta device: their sizes, strides and offsets count elements of what is
stored row by row, and torch's own functions cut, permute and select them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from polyshard.errors import CheckpointError

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the elements that are in it.

    Attributes:
        offsets: where the box begins, in each dim.
        name: of the stored tensor.
        view: on the meta device, of the box's shape, over that tensor's elements row by row.
    """

    offsets: tuple[int, ...]
    name: str
    view: Tensor


class Traced(Tensor):
    """A tensor without values that knows what it is made of, in pieces that do not overlap.

    Attributes:
        pieces: of which it consists; none if it is empty.
        like: on the meta device, with the strides and the storage that it would have.
    """

    pieces: tuple[Piece, ...]
    like: Tensor

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[Piece],
        like: Tensor | None = None,
    ) -> Self:
        """Of ``shape`` and ``dtype``; in memory of its own, unless it is ``like`` another."""
        if like is None:
            like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        make: Any = Tensor._make_wrapper_subclass
        made: Self = make(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device="meta",
        )
        made.pieces, made.like = tuple(pieces), like
        return made

    @classmethod
    def stored(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> Self:
        """A tensor that is stored as it is, under ``name``."""
        view = torch.empty(tuple(shape), dtype=dtype, device="meta")
        whole = (Piece((0,) * len(shape), name, view),) if view.numel() else ()
        return cls(shape, dtype, whole)

    @override
    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        del tensor_contents
        names = sorted({piece.name for piece in self.pieces})
        return f"Traced({tuple(self.shape)}, {self.dtype}, of {', '.join(names)})"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _RULES:
            raise CheckpointError(
                f"{func} computes with values or picks elements one by one, and only code that "
                "moves blocks of elements can be followed into files"
            )
        given = kwargs or {}
        found = _RULES[func](*args, **given)
        likes = func(*tree_map_only(Traced, lambda t: t.like, args), **given)
        if isinstance(found, Traced):
            return cls(found.shape, found.dtype, found.pieces, likes)
        both = zip(found, likes, strict=True)
        return [cls(each.shape, each.dtype, each.pieces, like) for each, like in both]


# What can be done to one -------------------------------------------------------------------------


def narrowed(whole: Traced, dim: int, start: int, length: int) -> Traced:
    """``length`` indices of one dim from ``start`` on."""
    pieces = []
    for piece in whole.pieces:
        first, size = piece.offsets[dim], piece.view.shape[dim]
        begin, end = max(first, start), min(first + size, start + length)
        if begin < end:
            offsets = _with(piece.offsets, dim, begin - start)
            view = piece.view.narrow(dim, begin - first, end - begin)
            pieces.append(Piece(offsets, piece.name, view))
    return Traced(_with(tuple(whole.shape), dim, length), whole.dtype, pieces)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _permuted(whole: Traced, dims: Sequence[int]) -> Traced:
    dims = [dim % whole.ndim for dim in dims]
    pieces = [
        Piece(tuple(p.offsets[d] for d in dims), p.name, p.view.permute(dims)) for p in whole.pieces
    ]
    return Traced([whole.shape[d] for d in dims], whole.dtype, pieces)


def _transposed(whole: Traced, one: int, other: int) -> Traced:
    dims = list(range(whole.ndim))
    one, other = one % whole.ndim, other % whole.ndim
    dims[one], dims[other] = dims[other], dims[one]
    return _permuted(whole, dims)


def _unsqueezed(whole: Traced, dim: int) -> Traced:
    dim %= whole.ndim + 1
    pieces = [
        Piece((*p.offsets[:dim], 0, *p.offsets[dim:]), p.name, p.view.unsqueeze(dim))
        for p in whole.pieces
    ]
    return Traced((*whole.shape[:dim], 1, *whole.shape[dim:]), whole.dtype, pieces)


def _squeezed(whole: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    asked = range(whole.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % whole.ndim for d in asked if whole.shape[d] == 1}
    left = [d for d in range(whole.ndim) if d not in gone]
    pieces = [
        Piece(tuple(p.offsets[d] for d in left), p.name, p.view.squeeze(tuple(gone)))
        for p in whole.pieces
    ]
    return Traced([whole.shape[d] for d in left], whole.dtype, pieces)


def _sliced(
    whole: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Traced:
    if step != 1:
        raise CheckpointError(f"a slice with step {step} cannot be followed into files")
    dim %= whole.ndim
    begin, stop, _ = slice(start, end).indices(whole.shape[dim])
    return narrowed(whole, dim, begin, max(0, stop - begin))


def _selected(whole: Traced, dim: int, index: int) -> Traced:
    dim %= whole.ndim
    return _squeezed(narrowed(whole, dim, index % whole.shape[dim], 1), dim)


def _split_sizes(whole: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    dim %= whole.ndim
    return [narrowed(whole, dim, start, n) for start, n in zip(starts, sizes, strict=True)]


def _split(whole: Traced, size: int, dim: int = 0) -> list[Traced]:
    length = whole.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, max(1, size))] or [0]
    return _split_sizes(whole, sizes, dim)


def _unbound(whole: Traced, dim: int = 0) -> list[Traced]:
    return [_selected(whole, dim, index) for index in range(whole.shape[dim])]


def _joined(parts: Sequence[Traced], dim: int = 0) -> Traced:
    dim %= parts[0].ndim
    pieces, start = [], 0
    for part in parts:
        for p in part.pieces:
            pieces.append(Piece(_with(p.offsets, dim, p.offsets[dim] + start), p.name, p.view))
        start += part.shape[dim]
    shape = _with(tuple(parts[0].shape), dim, start)
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return Traced(shape, dtype, pieces)


def _stacked(parts: Sequence[Traced], dim: int = 0) -> Traced:
    return _joined([_unsqueezed(part, dim) for part in parts], dim)


def _copied(whole: Traced, *, dtype: torch.dtype | None = None, **others: object) -> Traced:
    del others
    return Traced(whole.shape, dtype or whole.dtype, whole.pieces)


def _reshaped(whole: Traced, shape: Sequence[int]) -> Traced:
    """As ``view``: dims are merged and divided until they are those of ``shape``."""
    known = math.prod(size for size in shape if size != -1)
    wanted = [whole.numel() // known if size == -1 else size for size in shape]
    if not whole.numel():
        return Traced(wanted, whole.dtype, ())
    found = _squeezed(whole)
    target = [size for size in wanted if size != 1]
    for dim, size in enumerate(target):
        while found.shape[dim] % size:
            found = _merged(found, dim)
        if found.shape[dim] != size:
            found = _divided(found, dim, found.shape[dim] // size)
    for dim, size in enumerate(wanted):
        if size == 1:
            found = _unsqueezed(found, dim)
    return found


def _merged(whole: Traced, dim: int) -> Traced:
    """With ``dim`` and the next one as one."""
    inner = whole.shape[dim + 1]
    pieces = []
    for p in whole.pieces:
        (rows, columns), (apart, between) = p.view.shape[dim:][:2], p.view.stride()[dim:][:2]
        is_one = columns == inner and (rows == 1 or apart == inner * between)
        height = rows if is_one else 1
        for row in range(0, rows, height):
            view = p.view.narrow(dim, row, height)
            sizes = (*view.shape[:dim], height * columns, *view.shape[dim + 2 :])
            strides = (*view.stride()[:dim], *view.stride()[dim + 1 :])
            first = (p.offsets[dim] + row) * inner + p.offsets[dim + 1]
            offsets = (*p.offsets[:dim], first, *p.offsets[dim + 2 :])
            pieces.append(
                Piece(offsets, p.name, view.as_strided(sizes, strides, view.storage_offset()))
            )
    shape = (*whole.shape[:dim], whole.shape[dim] * inner, *whole.shape[dim + 2 :])
    return Traced(shape, whole.dtype, pieces)


def _divided(whole: Traced, dim: int, inner: int) -> Traced:
    """With ``dim`` as two, the second of ``inner`` indices."""
    pieces = []
    for p in whole.pieces:
        first, size, stride = p.offsets[dim], p.view.shape[dim], p.view.stride(dim)
        done = 0
        while done < size:
            row, column = divmod(first + done, inner)
            columns = min(inner - column, size - done)
            rows = max(1, (size - done) // inner) if not column else 1
            view = p.view.narrow(dim, done, rows * columns)
            sizes = (*view.shape[:dim], rows, columns, *view.shape[dim + 1 :])
            strides = (*view.stride()[:dim], columns * stride, *view.stride()[dim:])
            offsets = (*p.offsets[:dim], row, column, *p.offsets[dim + 1 :])
            pieces.append(
                Piece(offsets, p.name, view.as_strided(sizes, strides, view.storage_offset()))
            )
            done += rows * columns
    shape = (*whole.shape[:dim], whole.shape[dim] // inner, inner, *whole.shape[dim + 1 :])
    return Traced(shape, whole.dtype, pieces)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _copied,
    aten.detach.default: _copied,
    aten.clone.default: _copied,
    aten._to_copy.default: _copied,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.unbind.int: _unbound,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.t.default: lambda whole: _transposed(whole, 0, 1) if whole.ndim > 1 else whole,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
}


# The other way round -----------------------------------------------------------------------------


def parts_within(
    piece: Piece, shape: Sequence[int], offsets: Sequence[int], local: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Parts of a piece that lie in a box of the stored tensor.

    Args:
        piece: of which parts are wanted.
        shape: of the stored tensor.
        offsets: where the box begins in it.
        local: the box's elements, in any memory.

    Yields:
        Where a part begins in the tensor that ``piece`` is of, and the part, a view of ``local``.
    """
    if not (piece.view.numel() and local.numel()):
        return
    steps = _steps(piece.view, shape)
    if isinstance(steps, int):  # a dim to take apart
        for part in _halves(piece, steps):
            yield from parts_within(part, shape, offsets, local)
        return
    begin, view = list(piece.offsets), piece.view
    at = _place(int(view.storage_offset()), shape)
    for dim, (along, step) in enumerate(steps):
        if step:
            last = offsets[along] + local.shape[along] - 1
            low = max(0, -(-(offsets[along] - at[along]) // step))
            high = min(view.shape[dim] - 1, (last - at[along]) // step)
            if high < low:
                return
            view = view.narrow(dim, low, high - low + 1)
            begin[dim] += low
            at[along] += low * step
    inside = [i - o for i, o in zip(at, offsets, strict=True)]
    if any(not 0 <= i < n for i, n in zip(inside, local.shape, strict=True)):
        return
    first = sum(i * s for i, s in zip(inside, local.stride(), strict=True))
    strides = [step and step * local.stride(along) for along, step in steps]
    yield (
        tuple(begin),
        local.as_strided(tuple(view.shape), strides, local.storage_offset() + first),
    )


def _place(index: int, shape: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        found.append(rest)
    return found[::-1]


def _steps(view: Tensor, shape: Sequence[int]) -> list[tuple[int, int]] | int:
    """Along which dim of the stored tensor each dim of ``view`` goes, and in which steps.

    Where one continues from row to row, or two go along the same dim, its number instead: that dim
    has to be divided.
    """
    at = _place(int(view.storage_offset()), shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[tuple[int, int]] = []
    taken: dict[int, int] = {}
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size == 1:
            found.append((0, 0))
            continue
        fitting = [d for d, s in enumerate(strides) if shape[d] > 1 and stride % s == 0]
        along = fitting[0]
        step = stride // strides[along]
        if at[along] + (size - 1) * step >= shape[along]:
            return dim
        if along in taken:
            other = taken[along]
            return dim if step > found[other][1] else other
        taken[along] = dim
        found.append((along, step))
    return found


def _halves(piece: Piece, dim: int) -> Iterator[Piece]:
    size = piece.view.shape[dim]
    for start, length in ((0, size // 2), (size // 2, size - size // 2)):
        offsets = _with(piece.offsets, dim, piece.offsets[dim] + start)
        yield Piece(offsets, piece.name, piece.view.narrow(dim, start, length))
