"""Optimizers made before their model was sharded: they get the parameters that there are now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from polyshard.errors import LifecycleError
from polyshard_accelerate.sharding import Sharding

__all__ = ["Replaced"]


class Replaced:
    """Which parameter took the place of which."""

    def __init__(self) -> None:
        """None so far."""
        self._now: Any = WeakIdKeyDictionary()

    def shard(self, model: nn.Module, sharding: Sharding) -> None:
        """Shard ``model``, and remember what its parameters were."""
        before = dict(model.named_parameters(remove_duplicate=False))
        sharding.apply(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if before[name] is not parameter:
                self._now[before[name]] = parameter

    def switch(self, optimizers: Iterable[Optimizer]) -> None:
        """Have ``optimizers`` step the parameters that took the place of their own.

        Raises:
            LifecycleError: when one has state for a parameter: it is not sharded as that is now.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(p in self._now and optimizer.state.get(p) for p in group["params"]):
                    raise LifecycleError(
                        f"{type(optimizer).__name__} made a step, or loaded state, before its "
                        "model was sharded. Prepare the model first, and load state after that."
                    )
                group["params"] = [self._now.get(p, p) for p in group["params"]]
