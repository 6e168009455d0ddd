"""What parameters were when they were sharded, compared across ranks at the first forward.

[Note: initial values]
``fully_shard`` keeps on each rank its own part of its own values, as FSDP2 does. Ranks that were
initialised differently therefore train a mixture of their models, and nothing fails. So a checksum
of each full parameter is taken while it is still there, and ranks compare them when they compare
plans, in the same meeting. A difference is a warning and no error, because torch trains such
models, and because ranks may mean it (experts of their own, say).

A parameter is compared among the ranks that shard or replicate it, and only among those that hold
rows of it, had values (not on the meta device), and did not change them since: what is loaded or
initialised after ``fully_shard`` replaces what differed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from polyshard._torch.private import local_tensor, outside_transforms
from polyshard.errors import DifferentValuesWarning
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import ShardedParameter, Source

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHOWN_NAMES = 8
BLOCK_WORDS = 4095
"""How many words of 8 bytes are summed before their place counts; odd, so that a change of all
words of a block by the same amount does not vanish modulo 2^64."""


@dataclass(frozen=True)
class InitialValues:
    """Checksums of one parameter, 0-dim and int64 on its device. See [Note: initial values]."""

    parameter: ShardedParameter
    ranks: tuple[int, ...]
    """Those that shard or replicate it."""
    whole: Tensor
    part: Tensor
    """Of the rows that this rank keeps."""

    def are_held(self) -> bool:
        """Whether this rank's rows are what they were."""
        local = _local(self.parameter)
        return _has_values(local) and int(checksum(local)) == int(self.part)


@torch.no_grad()
def initial_values(
    groups: Iterable[ParameterGroup], sources: Sequence[Source]
) -> tuple[InitialValues, ...]:
    """Those of the parameters of ``groups``, just made of ``sources``, that have any here."""
    values = {source.owners[0]: source.value for source in sources}
    return tuple(
        InitialValues(p, group.roles.ranks, checksum(values[p.owners[0]]), checksum(_local(p)))
        for group in groups
        if len(group.roles.ranks) > 1
        for p in group.shards.parameters
        if _has_values(_local(p)) and _has_values(values[p.owners[0]])
    )


@outside_transforms
@torch.no_grad()
def notes_of(values: Iterable[InitialValues]) -> dict[tuple[int, ...], dict[str, str]]:
    """What ranks compare, by the ranks that do: checksums by the names of parameters."""
    notes: dict[tuple[int, ...], dict[str, str]] = {}
    for value in values:
        told = notes.setdefault(value.ranks, {})
        if value.are_held():
            told[value.parameter.info.fqn] = in_hex(value.whole)
    return notes


def warn_of_different(parameters: Mapping[str, Sequence[int]]) -> None:
    """Warn that ranks brought other values of ``parameters``, by name with ranks that differ."""
    if not parameters:
        return
    names = list(parameters)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    ranks = sorted({rank for each in parameters.values() for rank in each})
    warnings.warn(
        f"ranks {ranks} were given different initial values of {', '.join(names[:SHOWN_NAMES])}"
        f"{more}. fully_shard sends nothing: each rank keeps its part of its own values, so the "
        "sharded model is a mixture. Use one seed or one checkpoint on all ranks before "
        "fully_shard, or load one state dict after it. plugins=[SameValues()] makes this an error; "
        "if you intend it, filter polyshard.errors.DifferentValuesWarning.",
        DifferentValuesWarning,
        stacklevel=2,
    )


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of 64 bits of values and their order: 0-dim, int64, on their device.

    It reads ``tensor`` once, at the speed of memory, and waits for no device. A change of one word
    (8 bytes) is always found, others but for one in 2^64. Order is seen across blocks of 32 KiB,
    and everywhere in what is smaller than that.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass around other tensors
        inner, _ = tensor.__tensor_flatten__()
        return _mixed(torch.stack([checksum(getattr(tensor, name)) for name in inner]))
    words = _words(tensor.detach())
    whole = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    blocks = words[:whole].view(-1, BLOCK_WORDS).sum(1)
    return _mixed(torch.cat([blocks, words[whole:]]))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` lie at strides in memory, so that their bits can be read.

    Not so of sparse, nested and quantized tensors, and of those in a library's own layout.
    """
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def in_hex(checksum: Tensor) -> str:
    """Sixteen digits."""
    return f"{int(checksum) & (1 << 64) - 1:016x}"


def _local(parameter: ShardedParameter) -> Tensor:
    return local_tensor(cast("DTensor", parameter.parameter))


def _has_values(tensor: Tensor) -> bool:
    """Whether there is anything to read; not so of tensors that only stand for others."""
    is_plain = type(tensor) in {Tensor, nn.Parameter} or hasattr(tensor, "__tensor_flatten__")
    return is_plain and not tensor.is_meta and tensor.numel() > 0


def _words(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` as int64 ``[words]``; the last word is filled up with zeros."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """One word of all, to which each adds by its place (the finaliser of SplitMix64)."""
    places = torch.arange(1, words.numel() + 1, device=words.device)
    mixed = words + places * -0x61C8864680B583EB  # 2^64 over the golden ratio
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum()
