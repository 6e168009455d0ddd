"""What stages of torch.distributed.pipelining take from the state of torch's own engine.

[Note: pipeline stages]
A stage has every micro-batch's backward keep its gradients, then ends the step itself. Up to torch
2.14 it does so through private state: of ``fully_shard.state(module)`` it calls the post-backward
of each listed group, and then the callback that ends a root's backward. Our end of a backward
reduces every unit that no post-backward has reached, so the list is empty and the callback is all.
Later versions call public methods of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard


class StageState:
    """Stands where a stage looks for torch's state of a sharded module."""

    def __init__(self, end_backward: Callable[[], None]) -> None:
        """``end_backward`` reduces what the root of the module has accumulated."""
        self._state_ctx = SimpleNamespace(all_states=())
        self._root_post_backward_final_callback = end_backward


def show_to_stages(module: nn.Module, end_backward: Callable[[], None]) -> None:
    """Have a pipeline stage made of ``module`` find how a step ends. See [Note: pipeline stages].

    As a side effect torch's ``fully_shard`` refuses the module, as it does one of its own.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[getattr(fully_shard, "__wrapped__")] = StageState(end_backward)  # noqa: B009
