"""The registry in which torch's composable calls (``replicate``, ``fully_shard``) see each other.

Each is exercised by ``tests/torch/test_replicate.py`` on every torch version supported.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

__all__ = ["is_replicated", "register_sharded"]


def register_sharded(module: nn.Module) -> None:
    """Say that ``fully_shard`` was applied: ``replicate`` leaves the module and its own alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault("fully_shard", RegistryItem())


def is_replicated(module: nn.Module) -> bool:
    """Whether ``replicate`` was applied: what is below has its gradients averaged by it."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())
