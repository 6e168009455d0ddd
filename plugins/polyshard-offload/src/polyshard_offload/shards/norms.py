"""Norms of gradients, taken before the gradients go to where they rest.

[Note: norms before the move]
Clipping needs the norm of all gradients. Once they rest on the host or on disk, reading them again
costs what moving them cost. So each parameter's is taken while the reduced gradient is still on the
device, and counts as long as the gradient was not changed since. Version counters tell, which begin
at 0 for each gradient, except of ``GradScaler.unscale_``, whose writes torch does not count. So a
few elements are compared too; where all of them are zero, they tell nothing, and the gradient is
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard.plugins.seams import local_of
from polyshard_offload._torch_private import norms_of

SAMPLES = 4
"""Elements of a gradient that are compared, at most."""


class GradientNorms:
    """The norms of the gradients of one shard. See [Note: norms before the move]."""

    def __init__(self) -> None:
        # Parameters are held for good: weak references would keep torch from swapping their content
        # in ``module.to()``, and the owner of their shard holds them anyway.
        self._places: dict[int, tuple[Tensor, int, int]] = {}
        self._norms: dict[int, Tensor] = {}
        self._samples: dict[int, Tensor] = {}
        self._address = 0

    def hold(self, parameters: Sequence[Tensor], shard: Tensor) -> None:
        """``parameters`` are parts of ``shard``, and their gradients of what is recorded."""
        self._norms = {}
        self._places = {}
        for parameter in parameters:
            local = local_of(parameter)
            if local.numel() and not local.is_meta:
                start = (local.data_ptr() - shard.data_ptr()) // local.itemsize
                self._places[id(parameter)] = (parameter, start, local.numel())

    def record(self, gradient: Tensor, placed: Tensor) -> None:
        """``gradient`` (``[shard_numel]``) was just moved to ``placed``."""
        parts = [gradient[start : start + numel] for _, start, numel in self._places.values()]
        self._norms = dict(zip(self._places, norms_of(parts), strict=True))
        samples = (sample_of(part).clone() for part in parts)
        self._samples = dict(zip(self._places, samples, strict=True))
        self._address = placed.data_ptr()

    def of(self, parameter: Tensor) -> Tensor | None:
        """The 2-norm of the local part of ``parameter.grad`` (0-dim), if it is still that."""
        norm, gradient = self._norms.get(id(parameter)), parameter.grad
        if norm is None or gradient is None:
            return None
        _, start, _ = self._places[id(parameter)]
        local = local_of(gradient)
        here = self._address + start * local.itemsize
        untouched = local._version == gradient._version == 0 and local.data_ptr() == here
        return norm if untouched and self._looks_the_same(parameter, local) else None

    def _looks_the_same(self, parameter: Tensor, local: Tensor) -> bool:
        sample = self._samples[id(parameter)].to(local.device)
        return bool(sample.any()) and torch.equal(sample_of(local.view(-1)), sample)


def sample_of(values: Tensor) -> Tensor:
    """Some elements of a flat tensor."""
    return values[:: -(-values.numel() // SAMPLES)]
