"""A group's gradients on their way out of autograd: flattened, accumulated, reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from polyshard.errors import PluginError
from polyshard.onion import Onion
from polyshard.reduction import InFlight, ReduceSettings
from polyshard.runtime import Runtime
from polyshard.shards import Shards


class Gradients:
    """Unsharded gradients of one group, from the leaves to the reducer.

    The runtime is passed in, because a conversion of the parameters makes a new one.
    """

    def __init__(self, shards: Shards, onion: Onion, settings: ReduceSettings) -> None:
        """``onion`` flattens gradients the way parameters were."""
        self._shards = shards
        self._onion = onion
        self._settings = settings
        self._accumulated: dict[int, Tensor] = {}
        self._has_unreduced = False
        self._flattens = [any(e is not None for e in p.extensions) for p in shards.parameters]

    def accumulate(self, runtime: Runtime) -> None:
        """Keep this backward's gradients unsharded, in the reduce dtype, for a later reduction."""
        self._has_unreduced = True
        for index, leaf in enumerate(runtime.leaves):
            if leaf.grad is not None and leaf.grad.dtype != runtime.dtypes.reduce:
                gradient = self._flattened(index, leaf.grad)
                self._accumulated[index] = self._sum(index, gradient, runtime.dtypes.reduce)
                leaf.grad = None

    def take(self, runtime: Runtime) -> dict[int, Tensor]:
        """Unsharded gradients by parameter index; the leaves give them up."""
        taken: dict[int, Tensor] = {}
        for index, leaf in enumerate(runtime.leaves):
            gradient = leaf.grad
            if gradient is not None:
                leaf.grad = None
                gradient = self._flattened(index, gradient)
                if index in self._accumulated:
                    gradient = self._sum(index, gradient, runtime.dtypes.reduce)
                taken[index] = gradient
            elif index in self._accumulated:
                taken[index] = self._accumulated[index]
            elif self._settings.reduce_unused and leaf.requires_grad:
                placed = self._shards.layout.parameters[index]
                device = runtime.buffer.tensor.device
                taken[index] = torch.zeros(placed.shape, dtype=runtime.dtypes.param, device=device)
        self._accumulated.clear()
        return taken

    def _flattened(self, index: int, gradient: Tensor) -> Tensor:
        if not self._flattens[index]:
            return gradient
        parameter = self._shards.parameters[index]
        with torch.no_grad():
            flat = self._onion.flatten(gradient, parameter.info)[0]
        expected = self._shards.layout.parameters[index].shape
        if flat.shape != expected:
            layers = ", ".join(f"'{n}'" for n in self._onion.layers_of(parameter.extensions))
            raise PluginError(
                f"plugins {layers}: pre_flatten_transform made {tuple(flat.shape)} of the gradient "
                f"of '{parameter.info.fqn}', but {expected} of the parameter; flatten both alike."
            )
        return flat

    def _sum(self, index: int, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        held = self._accumulated.get(index)
        return gradient.to(dtype) if held is None else held.add_(gradient)

    def wire_dtype(self, runtime: Runtime) -> torch.dtype:
        """Dtype gradients travel in; from settings alone. See [Note: reduction]."""
        dtypes = runtime.dtypes
        if self._has_unreduced or dtypes.param.itemsize > dtypes.reduce.itemsize:
            return dtypes.reduce
        same = dtypes.param.itemsize == dtypes.reduce.itemsize
        return dtypes.reduce if same else dtypes.param

    def start(self, runtime: Runtime, gradients: dict[int, Tensor]) -> tuple[InFlight, int]:
        """Begin to reduce what :meth:`take` returned; also the bytes that leave this rank."""
        wire = self.wire_dtype(runtime)
        self._has_unreduced = False
        return runtime.reducer.start(gradients, wire)

    def discard(self, runtime: Runtime) -> None:
        """Forget everything a failed step left behind."""
        self.take(runtime)
        self._has_unreduced = False
        runtime.reducer.discard()
