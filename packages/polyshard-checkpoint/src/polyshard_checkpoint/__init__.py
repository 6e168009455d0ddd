"""Saving and resuming a run: one call each, whole or not at all. See :class:`Checkpoints`."""

from polyshard_checkpoint.checkpoints import Checkpoints, Restored, Saving
from polyshard_checkpoint.folder import checkpoints_in
from polyshard_checkpoint.pretrained import load_pretrained, save_pretrained
from polyshard_checkpoint.reading import CheckpointPlanner, CheckpointReader
from polyshard_checkpoint.state import TrainingState
from polyshard_checkpoint.writing import Progress

__all__ = [
    "CheckpointPlanner",
    "CheckpointReader",
    "Checkpoints",
    "Progress",
    "Restored",
    "Saving",
    "TrainingState",
    "checkpoints_in",
    "load_pretrained",
    "save_pretrained",
]
