"""What torch's own code takes from the private state of its engine, given for ours.

[Note: pipeline stages]
A stage of torch.distributed.pipelining has every micro-batch's backward keep its gradients, then
ends the step itself. Up to torch 2.14 it does so through private state: of
``fully_shard.state(module)`` it calls the post-backward of each listed group, and then the callback
that ends a root's backward. Our end of a backward reduces every unit that no post-backward has
reached, so the list is empty and the callback is all. Later versions call public methods.

[Note: torch's function for other methods]
Libraries call ``torch.distributed.fsdp.register_fsdp_forward_method`` by that name on any
``FSDPModule``. The method it makes asks the module for its state, and that for what is done before
and after a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard

from polyshard.errors import UnsupportedError

__all__ = ["is_replicated", "register_sharded"]


def register_sharded(module: nn.Module) -> None:
    """Say that ``fully_shard`` was applied: ``replicate`` leaves the module and its own alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault("fully_shard", RegistryItem())


def is_replicated(module: nn.Module) -> bool:
    """Whether ``replicate`` was applied: what is below has its gradients averaged by it."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


class _AbsentError(UnsupportedError, AttributeError):
    """As an ``AttributeError``, so that ``hasattr`` says no."""


class EngineState:
    """Stands where torch's code looks for its own state of a sharded module."""

    def __init__(
        self,
        around_forward: tuple[Callable[..., Any], Callable[..., Any]],
        end_backward: Callable[[], None],
        line: Callable[[], object],
    ) -> None:
        """Tell it what torch may ask for.

        Args:
            around_forward: what hooks do before and after a forward.
            end_backward: what ends a root's backward.
            line: gives the same object for modules that share their communication.
        """
        self._pre_forward, self._post_forward = around_forward
        self._state_ctx = SimpleNamespace(all_states=())
        self._root_post_backward_final_callback = end_backward
        self._line = line

    @property
    def _comm_ctx(self) -> object:
        """Pipelines of torch 2.15 compare it between their stages."""
        return self._line()

    def __getattr__(self, name: str) -> NoReturn:
        raise _AbsentError(
            "this module is sharded by polyshard, not by torch.distributed.fsdp: its state has no "
            f"'{name}'. Use the public methods of FSDPModule."
        )


def show_to_torch(module: nn.Module, state: EngineState) -> None:
    """Have torch's code find ``state``. See the notes of this file.

    As a side effect torch's ``fully_shard`` refuses the module, as it does one of its own.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[getattr(fully_shard, "__wrapped__")] = state  # noqa: B009


def shown_to_torch(module: nn.Module) -> Any:
    """What :func:`show_to_torch` was given."""
    return getattr(fully_shard, "state")(module)  # noqa: B009
