"""Saving and resuming a run: one call each, whole or not at all. See :class:`Checkpoints`."""

from polyshard.checkpoint.checkpoints import Checkpoints, Restored, Saving
from polyshard.checkpoint.folder import checkpoints_in
from polyshard.checkpoint.reading import CheckpointPlanner, CheckpointReader
from polyshard.checkpoint.state import TrainingState
from polyshard.checkpoint.writing import Progress

__all__ = [
    "CheckpointPlanner",
    "CheckpointReader",
    "Checkpoints",
    "Progress",
    "Restored",
    "Saving",
    "TrainingState",
    "checkpoints_in",
]
