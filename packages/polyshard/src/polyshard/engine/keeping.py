"""What plugins keep for a model: saved beside it, and let go with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from polyshard.engine.root import groups_by_label, groups_of, preview_names
from polyshard.errors import CheckpointError, call_all
from polyshard.plugins.seams import Stateful


def plugin_state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state that the plugins of ``model`` need to resume, such as error feedback.

    Save it beside the model's state dict. Keys begin with the rank: the state of all ranks together
    makes one checkpoint. The model also loads without it.

    Args:
        model: the outermost sharded module.

    Raises:
        SettingError: if no part of the model is sharded.
    """
    return {key: _asked(state, "state_dict", key) for key, state in _states(model)}


def load_plugin_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Restore the state from :func:`plugin_state_dict`, on the same number of ranks.

    Args:
        model: the outermost sharded module, with the same plugins.
        state_dict: saved state of this rank or of all ranks.

    Raises:
        CheckpointError: if it lacks the state of a plugin and group of this rank. Without this
            call, plugins start without state.
    """
    states = dict(_states(model))
    missing = [key for key in states if key not in state_dict]
    if missing:
        raise CheckpointError(
            f"the saved plugin state has no {', '.join(map(repr, missing))}, only "
            f"{', '.join(map(repr, sorted(state_dict))) or 'nothing'}. Load it with the number of "
            "ranks, the units and the plugins that saved it; to start without it, do not load it."
        )
    for key, state in states.items():
        _asked(state, "load_state_dict", key, state_dict[key])


def close(model: nn.Module) -> None:
    """Release files, memory and threads that plugins made for ``model``.

    For models that end before the process; garbage collection releases them too, later. Parameters
    keep their values, gradients of an unfinished step are lost, and the model cannot run again. A
    second call does nothing.

    Args:
        model: the outermost sharded module.

    Raises:
        Exception: the first that a plugin raised, after all plugins were called.
    """
    call_all(group.close for group in reversed(groups_of(model)))


def _asked(state: Stateful, method: str, key: str, *given: Any) -> Any:
    """The answer of a plugin's state; an exception gets a note of whose it is."""
    try:
        return getattr(state, method)(*given)
    except Exception as error:
        error.add_note(f"raised in {method} of the plugin state '{key}'")
        raise


def _states(model: nn.Module) -> Iterator[tuple[str, Stateful]]:
    """By a key that no other rank, plugin and group has."""
    groups = groups_by_label(model)
    preview_names(model)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for label, group in groups.items():
        if group.contributions.states:
            group.prepare()  # plugins make what they keep when they are bound
        for plugin, state in group.contributions.states:
            # With the number of ranks, so that all or none find their own.
            yield f"rank{rank}of{size}.{plugin}.{label}", state
