"""Looks at every optimizer that steps a model whose slots were run, whether or not it was asked to.

[Note: no optimizer unseen]
Nothing leads from a parameter to who steps it, and an optimizer that depends on where shards end
fails in no other way than by other bits. torch has hooks for the steps of all optimizers. From one
of these every plugin object that has run slots looks at an optimizer once, and again when its
groups changed. What steps parameters and is no ``torch.optim.Optimizer`` goes unseen; what steps
none that are sharded is let be.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim import Optimizer

from polyshard.engine.every_step import before_every_step
from polyshard_reproducible.checks import check_optimizer
from polyshard_reproducible.names import sharded_parameters


class OptimizerWatch:
    """See [Note: no optimizer unseen]."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()

    def add(self, model: nn.Module) -> None:
        """Look at what steps ``model`` from now on."""
        if model in self._models:
            return
        self._models.add(model)
        self._seen.clear()
        before_every_step(self, OptimizerWatch.look)

    def look(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer of these models that makes other bits of other shards.

        Raises:
            ReproducibleError: before it steps; on all ranks, which have the same optimizers.
        """
        groups = [(len(group["params"]), group.get("fused")) for group in optimizer.param_groups]
        if self._seen.get(optimizer) == groups:
            return
        own = {id(p) for model in self._models for p in sharded_parameters(model).values()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            check_optimizer(optimizer)
        self._seen[optimizer] = groups
