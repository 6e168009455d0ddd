"""What a run consists of, and its form in a checkpoint.

[Note: entries]
``model`` and ``optimizer`` are in a checkpoint as torch's own helpers give them, under the original
names and in native precision: ``dcp.load`` of plain torch fills a model and an optimizer from it.
What else a run needs is under ``polyshard.``, packed: ``polyshard.shared.NAME`` once, and
``polyshard.rank0of2.NAME`` for state of one rank, with the number of ranks in the key, because it
means nothing to another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from polyshard._torch.random_state import RandomState
from polyshard.engine.keeping import load_plugin_state_dict, plugin_state_dict
from polyshard.errors import CheckpointError, SettingError
from polyshard.module import FSDPModule
from polyshard.plugins.seams import Stateful
from polyshard_checkpoint.optimizers import (
    OPTIMIZER,
    load_optimizers,
    optimizers_state,
    parameter_names,
    room_for_optimizers,
)
from polyshard_checkpoint.packing import (
    Entries,
    check_plain,
    is_packed,
    pack,
    room_for,
    unpack,
)

MODEL = "model"
PLUGINS, RANDOM = "plugins", "random"


@dataclass(frozen=True)
class TrainingState:
    """Everything that a run needs to resume exactly.

    Attributes:
        model: sharded or not.
        optimizers: of the model's parameters.
        shared: other state that is the same on every rank: the scheduler, the position in the data.
        per_rank: other state that differs between ranks. It is lost when a run resumes with
            another number of ranks; :attr:`Restored.notes` then says so.
        random: whether to save random number generators, as state per rank.

    Raises:
        SettingError: if ``per_rank`` has a name reserved for plugins or random numbers.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    shared: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    random: bool = True

    def __post_init__(self) -> None:
        taken = {PLUGINS, RANDOM} & set(self.per_rank)
        if taken:
            raise SettingError(f"per_rank={sorted(taken)}: saved by itself; choose another name.")

    def save(self, place: str) -> Entries:
        """Entries of a checkpoint, those of the rank ``place`` included; tensors are live.

        Raises:
            CheckpointError: naming what cannot be saved.
        """
        entries: Entries = {MODEL: get_model_state_dict(self.model)}
        if self.optimizers:
            entries[OPTIMIZER] = optimizers_state(self.model, self.optimizers)
        check_plain(entries)
        for key, state in self._kept(place):
            entries |= pack(key, _asked(key, state.state_dict))
        return entries

    def room(self, place: str, metadata: Metadata) -> tuple[Entries, tuple[str, ...]]:
        """Entries to load a checkpoint into, and what is left out because it has none of it.

        Raises:
            CheckpointError: when the checkpoint lacks state that does not belong to one rank.
        """
        entries: Entries = {MODEL: get_model_state_dict(self.model)}
        if self.optimizers:
            names = parameter_names(self.model, self.optimizers)
            entries[OPTIMIZER] = room_for_optimizers(metadata, entries[MODEL], names)
        notes = []
        for key, _ in self._kept(place):
            if is_packed(key, metadata):
                entries |= room_for(key, metadata)
            elif place in key:
                notes.append(f"{key.rpartition('.')[2]}: nothing was saved by {place}; left as is")
            else:
                raise CheckpointError(
                    f"it has no state of '{key.rpartition('.')[2]}'. Leave it out of the "
                    "TrainingState to load the rest"
                )
        return entries, tuple(notes)

    def load(self, place: str, entries: Entries) -> None:
        """Continue from entries that were loaded into :meth:`room`.

        Raises:
            CheckpointError: naming what did not take its state.
        """
        set_model_state_dict(self.model, entries[MODEL])
        if self.optimizers:
            load_optimizers(self.model, self.optimizers, entries[OPTIMIZER])
        for key, state in self._kept(place):
            if f"{key}.form" in entries:
                saved = unpack(key, entries)
                _asked(key, lambda state=state, saved=saved: state.load_state_dict(saved))

    def _kept(self, place: str) -> Iterator[tuple[str, Stateful]]:
        """All but the model and its optimizers, by key; random numbers last: others may draw."""
        for name, state in self.shared.items():
            yield f"polyshard.shared.{name}", state
        for name, state in self.per_rank.items():
            yield f"polyshard.{place}.{name}", state
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            yield f"polyshard.{place}.{PLUGINS}", _PluginState(self.model)
        if self.random:
            yield f"polyshard.{place}.{RANDOM}", RandomState()


@dataclass(frozen=True)
class _PluginState:
    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return dict(plugin_state_dict(self.model))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_plugin_state_dict(self.model, state_dict)


def _asked(key: str, ask: Any) -> Any:
    try:
        return ask()
    except Exception as error:
        raise CheckpointError(
            f"the state of '{key.rpartition('.')[2]}' ({type(error).__name__}): {error}"
        ) from error
