"""Which tensors a receiver gets, and which parts of them each rank holds.

[Note: coordinates]
Everything on the wire is in the coordinates of the receiver's tensors, which are those of its
checkpoint: a box of elements (where it begins, how large it is in each dim) of a tensor of a name.
No receiver knows how the trainer is sharded, so that may change from version to version.

Which boxes a rank holds is what ``torch.distributed.checkpoint`` plans for a save: it knows all
placements (FSDP, TP × FSDP, uneven and empty shards), gives what several ranks hold (HSDP, buffers)
to one of them, and balances their bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.staged import plan_for_all
from polyshard.errors import SettingError
from polyshard_checkpoint.safetensors.header import DTYPES
from polyshard_checkpoint.safetensors.model import shared_names
from polyshard_publish.blocks import Block
from polyshard_publish.errors import CatalogueError, PublishError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Index = tuple["int | slice", ...]


@dataclass(frozen=True)
class Part:
    """A part of a tensor of the model, and where it belongs at the receiver.

    Attributes:
        name: of the receiver's tensor.
        take: which part of the model's tensor, as one indexes it: ``(slice(0, 64),)`` its first
            rows, ``(3,)`` the fourth of stacked experts. All of it by default.
        place: where in the receiver's tensor, alike; an ``int`` is a dim that the part has not.
        shape: of the receiver's tensor, where it consists of several parts.
    """

    name: str
    take: Index = ()
    place: Index = ()
    shape: tuple[int, ...] | None = None


Names = Callable[[str], "str | Sequence[Part] | None"]
"""What the receiver calls a tensor of the model, which parts it is split into, or ``None``."""
Dtypes = Callable[[str], "torch.dtype | None"]
"""The dtype of a floating-point tensor at the receiver, by the receiver's name of it."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a receiver: the name of its dtype (as safetensors has it), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as torch's."""
        return DTYPES[self.dtype]

    @staticmethod
    def of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
        """That of a tensor; a :class:`CatalogueError` for a dtype that no receiver could hold."""
        if dtype not in DTYPE_NAMES:
            raise CatalogueError(f"'{name}' is {dtype}, which cannot be published; give dtype=.")
        return Entry(DTYPE_NAMES[dtype], tuple(shape))


Catalogue = Mapping[str, Entry]
"""What a receiver has: each tensor's dtype and shape, by name."""


def differences(ours: Catalogue, theirs: Catalogue) -> list[str]:
    """What keeps ``theirs``, a receiver's, from being filled with ``ours``; a sentence a tensor."""
    found = [f"'{name}' is unknown to the receiver" for name in sorted(set(ours) - set(theirs))]
    found += [f"'{name}' is not sent" for name in sorted(set(theirs) - set(ours))]
    for name in sorted(set(ours) & set(theirs)):
        sent, held = ours[name], theirs[name]
        if sent != held:
            found.append(
                f"'{name}' is {sent.dtype} {list(sent.shape)}, the receiver's {held.dtype} "
                f"{list(held.shape)}"
            )
    return found


@dataclass(frozen=True)
class Piece:
    """What one rank sends of one tensor."""

    source: str  # the model's name of it
    local: Index  # which part of this rank's part of the model's tensor
    name: str  # the receiver's name
    block: Block  # where it belongs there

    def of(self, state: Mapping[str, Any]) -> Tensor:
        """Its values in a state dict, in their native dtype."""
        return plain(self.source, state[self.source])[self.local].reshape(self.block.sizes)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under their own names; shards as they are, and none gathered."""
    with torch.no_grad():
        state = get_model_state_dict(model)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def plain(name: str, value: Tensor) -> Tensor:
    """This rank's part as a plain tensor; of a subclass (a quantized one) its values."""
    local = local_tensor(value) if isinstance(value, DTensor) else value
    local = local.detach()
    if type(local) in (Tensor, nn.Parameter):
        return local
    if hasattr(local, "__tensor_flatten__"):
        inner = [getattr(local, attribute) for attribute in local.__tensor_flatten__()[0]]
        if len(inner) == 1 and inner[0].shape == local.shape and inner[0].dtype == local.dtype:
            return plain(name, inner[0])
    try:
        found = local.dequantize()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise PublishError(
            f"'{name}' is a {type(local).__name__}, which does not dequantize: {error}. Leave it "
            "out by names=, or give it a dequantize() that returns its values."
        ) from error
    return found if type(found) is Tensor else plain(name, found)


def _described(value: Tensor) -> Tensor:
    """``value``, or something alike of a subclass, which may not answer what a planner asks."""
    local = local_tensor(value) if isinstance(value, DTensor) else value
    if type(local) in (Tensor, nn.Parameter):
        return value
    alike = torch.empty(local.shape, dtype=local.dtype, device="meta")
    if not isinstance(value, DTensor):
        return alike
    return DTensor.from_local(
        alike,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def layout_of(
    model: nn.Module,
    names: Names | None,
    dtypes: Dtypes,
    gathered: Callable[[SavePlan], list[SavePlan]],
    rank: int,
) -> tuple[Catalogue, list[Piece]]:
    """What is published of ``model``, and what ``rank`` sends of it; ``gathered`` asks all ranks.

    Raises:
        SettingError: when ``names`` gives elements to two parts, or to none, or leaves nothing.
        CatalogueError: for dtypes that cannot be published.
    """
    state = state_of(model)
    for several in shared_names(model):  # tied tensors are sent once
        for name in [name for name in several if name in state][1:]:
            del state[name]
    planner = DefaultSavePlanner()
    described = {name: _described(value) for name, value in state.items()}
    planner.set_up_planner(described, is_coordinator=True)
    plans, metadata = plan_for_all(gathered(planner.create_local_plan()))
    parts: dict[str, list[tuple[Part, Block, Block]]] = {}
    catalogue: dict[str, Entry] = {}
    filled: dict[str, list[Block]] = {}
    for source, stored in metadata.state_dict_metadata.items():
        whole = tuple(getattr(stored, "size", ()))
        dtype = getattr(stored, "properties").dtype  # noqa: B009  # of its subclasses, tensors
        parts[source] = list(_parts(source, whole, names))
        for part, _, placed in parts[source]:
            wanted = dtypes(part.name) if dtype.is_floating_point else None
            if wanted is not None and not wanted.is_floating_point:
                raise SettingError(
                    f"dtype= makes '{part.name}' {wanted}, which cannot hold {dtype}; choose a "
                    "floating-point one, or None for its own."
                )
            entry = Entry.of(part.name, wanted or dtype, part.shape or placed.sizes)
            if catalogue.setdefault(part.name, entry) != entry:
                raise SettingError(
                    f"names= makes '{part.name}' of parts that say {catalogue[part.name]} and "
                    f"{entry}; all of them give the same shape=."
                )
            filled.setdefault(part.name, []).append(placed)
    _check_filled(catalogue, filled)
    pieces = []
    for item in plans[rank].items:
        chunk = getattr(item.tensor_data, "chunk")  # noqa: B009
        held = Block(tuple(chunk.offsets), tuple(chunk.sizes))
        for part, taken, placed in parts[item.index.fqn]:
            if (met := _met(held, taken)) is not None:
                pieces.append(_piece(item.index.fqn, part, met, held, taken, placed))
    return catalogue, pieces


def _parts(
    source: str, whole: tuple[int, ...], names: Names | None
) -> Iterator[tuple[Part, Block, Block]]:
    """Parts that a tensor is split into, with the boxes of source and receiver."""
    called = source if names is None else names(source)
    if called is None:
        return
    for part in [Part(called)] if isinstance(called, str) else called:
        taken = _box(part.take, whole, f"names= takes {part.take} of '{source}'")
        kept = _kept(part.take, taken.sizes)
        if part.shape is None:
            if part.place:
                raise SettingError(f"names= places a part in '{part.name}': give its shape= too.")
            yield part, taken, Block((0,) * len(kept), kept)
            continue
        placed = _box(part.place, part.shape, f"names= places '{source}' at {part.place}")
        room = _kept(part.place, placed.sizes)
        if room != kept:
            raise SettingError(
                f"names= places {list(kept)} elements of '{source}' {list(whole)} where "
                f"'{part.name}' {list(part.shape)} has room for {list(room)}."
            )
        yield part, taken, placed


def _is_int(index: Index, dim: int) -> bool:
    return dim < len(index) and isinstance(index[dim], int)


def _kept(index: Index, numbers: Sequence[int]) -> tuple[int, ...]:
    """Those of dims that an ``int`` does not take away."""
    return tuple(number for dim, number in enumerate(numbers) if not _is_int(index, dim))


def _box(index: Index, shape: tuple[int, ...], doing: str) -> Block:
    """The box that ``index`` means in a tensor of ``shape``."""
    if len(index) > len(shape):
        raise SettingError(f"{doing}, which has {len(shape)} dims.")
    offsets, lengths, every = [], [], [slice(None)] * len(shape)
    for one, size in zip((*index, *every[len(index) :]), shape, strict=True):
        where = slice(one, one + 1) if isinstance(one, int) else one
        start = 0 if where.start is None else where.start
        stop = size if where.stop is None else where.stop
        if where.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise SettingError(f"{doing}: {where} is no range within a dim of {size}.")
        offsets.append(start)
        lengths.append(stop - start)
    return Block(tuple(offsets), tuple(lengths))


def _piece(source: str, part: Part, met: Block, held: Block, taken: Block, placed: Block) -> Piece:
    """What a rank that holds ``held`` of a tensor sends of a part of it: the box ``met``."""
    within = Block(tuple(m - h for m, h in zip(met.offsets, held.offsets, strict=True)), met.sizes)
    local = [
        where.start if _is_int(part.take, dim) else where
        for dim, where in enumerate(within.slices())
    ]
    moved = [m - t for m, t in zip(met.offsets, taken.offsets, strict=True)]
    kept = iter(zip(_kept(part.take, moved), _kept(part.take, met.sizes), strict=True))
    there = [
        (0, 1) if _is_int(part.place, dim) else next(kept) for dim in range(len(placed.offsets))
    ]
    offsets = tuple(o + begin for o, (begin, _) in zip(placed.offsets, there, strict=True))
    return Piece(source, tuple(local), part.name, Block(offsets, tuple(n for _, n in there)))


def _met(one: Block, other: Block) -> Block | None:
    """The box that both have in common."""
    begins = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Block(begins, sizes) if min(sizes, default=1) > 0 else None


def _check_filled(catalogue: Catalogue, filled: Mapping[str, Sequence[Block]]) -> None:
    """Every element of every tensor of a receiver comes from one place."""
    if not catalogue:
        raise SettingError("there is nothing to publish: names= gave None for each tensor.")
    for name, blocks in filled.items():
        if any(_met(one, other) for one, other in itertools.combinations(blocks, 2)):
            raise SettingError(f"names= gives elements of '{name}' twice; each has one source.")
        held = sum(block.elements for block in blocks)
        wanted = math.prod(catalogue[name].shape)
        if held != wanted:
            raise SettingError(
                f"names= fills {held:,} of the {wanted:,} elements of '{name}' "
                f"{list(catalogue[name].shape)}; the rest would never get values."
            )
