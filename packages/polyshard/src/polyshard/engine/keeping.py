"""What plugins keep for a model: saved beside it, and let go with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from polyshard.engine.root import groups_of, preview_names
from polyshard.errors import CheckpointError
from polyshard.plugins.seams import Stateful


def plugin_state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the plugins of ``model`` need to go on as they would have, as errors they feed back.

    Save it beside the model's state dict. Keys begin with the rank, because every rank has state of
    its own: all of them together make one checkpoint. A model loads without it.

    Args:
        model: the outermost sharded module.

    Raises:
        SettingError: when nothing of it is sharded.
    """
    return {key: _asked(state, "state_dict", key) for key, state in _states(model)}


def load_plugin_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Go on from what :func:`plugin_state_dict` gave, on as many ranks.

    Args:
        model: the outermost sharded module, with the plugins that it had.
        state_dict: what was saved, by this rank or by all.

    Raises:
        CheckpointError: when it has nothing for a plugin and group of this rank. Without calling
            this, plugins start afresh.
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
    """Have plugins let go of what they made for ``model``: files, memory, threads.

    For models that end before the process does; what nobody holds any more is let go of by itself,
    sooner or later. Parameters stay as they are, gradients of a step that has not ended are lost,
    and the model cannot run any more. Harmless the second time.

    Args:
        model: the outermost sharded module.

    Raises:
        Exception: the first that a plugin raised, when all have been asked.
    """
    errors: list[Exception] = []
    for group in reversed(groups_of(model)):
        try:
            group.close()
        except Exception as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and then: {other!r}")
        raise errors[0]


def _asked(state: Stateful, method: str, key: str, *given: Any) -> Any:
    """The answer of a plugin's state; an exception gets a note of whose it is."""
    try:
        return getattr(state, method)(*given)
    except Exception as error:
        error.add_note(f"raised in {method} of the plugin state '{key}'")
        raise


def _states(model: nn.Module) -> Iterator[tuple[str, Stateful]]:
    """By a key that no other rank, plugin and group has."""
    groups = groups_of(model)
    preview_names(model)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for group in groups:
        if group.contributions.states:
            group.prepare()  # plugins make what they keep when they are bound
        for plugin, state in group.contributions.states:
            # With the number of ranks, so that all or none find their own.
            yield f"rank{rank}of{size}.{plugin}.{group.name}", state
