"""Whether replicas are equal: tensors whose placements say that ranks hold the same.

Digests are compared by one all-reduce a process group: the largest of a number and the largest of
its complement are those of the same number only if all ranks have that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard.guards.peers import axes_of, gathered, ranks_in_words
from polyshard.guards.watch import Look

KINDS = ("weights", "optimizer state")


def replicated_over(parameters: Sequence[Tensor]) -> dict[dist.ProcessGroup, list[int]]:
    """For each process group, which parameters its ranks hold alike."""
    found: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        for mesh, axis in axes_of(parameter):
            assert isinstance(parameter, DTensor)
            if parameter.placements[axis].is_replicate():
                found.setdefault(mesh.get_group(axis), []).append(index)
    return found


def differing(
    look: Look, parameters: Sequence[Tensor], names: Sequence[str], device: torch.device
) -> Iterator[str]:
    """What replicas do not hold alike, in words; the same on all ranks of a process group."""
    shared = replicated_over(parameters)
    if not shared:
        return
    numbers = look.summaries(len(parameters))
    for group, indices in shared.items():
        own = torch.stack([n.to(device) for index in indices for n in numbers[index]])
        extremes = torch.cat([own, ~own])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes[: own.numel()], ~extremes[own.numel() :]
        wrong = (largest != smallest).nonzero().flatten().tolist()
        if not wrong:
            continue
        every = gathered([int(own[place]) for place in wrong], group)
        for row, place in enumerate(wrong):
            index, kind = divmod(place, len(KINDS))
            yield _said(names[indices[index]], KINDS[kind], [each[row] for each in every], group)


def _said(name: str, kind: str, numbers: list[int], group: dist.ProcessGroup) -> str:
    """Which ranks hold which of several values: the fewest are most likely the wrong ones."""
    ranks = dist.get_process_group_ranks(group)
    kinds = [[r for r, n in zip(ranks, numbers, strict=True) if n == k] for k in {*numbers}]
    sides = " and ".join(ranks_in_words(side) for side in sorted(kinds, key=lambda k: (len(k), k)))
    return f"replicas of '{name}' ({kind}): {sides} differ"
