"""A process that is killed while it saves, at every moment that others can see."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_models import build
from toy_runs import assert_equal, whole

from polyshard_checkpoint import Checkpoints, TrainingState

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

CALLS = ("open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "tempfile.mkdtemp")
"""Audited calls that change files."""


def small(seed: int) -> Any:
    return build(seed, width=4, hidden=4, layers=1)


def save_until(call: int, folder: Path) -> int:
    """Save in a child that dies at its ``call``-th call on the folder; returns its exit code."""
    child = os.fork()
    if child == 0:
        seen = 0

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in CALLS and str(folder) in str(arguments[0]):
                seen += 1
                if seen == call:
                    os._exit(9)

        sys.addaudithook(audit)
        try:
            Checkpoints(folder, keep=1).save(2, TrainingState(small(2), random=False))
            os._exit(0)
        finally:  # it must not continue as a second pytest
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    weights = {1: whole(small(1)), 2: whole(small(2))}
    survived, call, code = set(), 0, 9
    while code == 9:
        call += 1
        folder = tmp_path / str(call)
        Checkpoints(folder, keep=1).save(1, TrainingState(small(1), random=False))
        code = save_until(call, folder)
        found = TrainingState(small(3), random=False)
        restored = Checkpoints(folder).load(found)
        assert restored is not None, call
        assert restored.notes == ()
        assert_equal(whole(found.model), weights[restored.step])
        survived.add(restored.step)
        Checkpoints(folder, keep=1).save(5, found)
        assert [p.name for p in folder.iterdir()] == ["step-000005"]
    assert code == 0
    assert survived == {1, 2}, "it died before it was complete, and after"
    assert call > 10


def test_every_file_is_on_disk_before_older_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power keeps what was synced, in the sizes of then."""
    synced: dict[int, int] = {}
    sync = os.fsync

    def noted(file: int) -> None:
        sync(file)
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", noted)
    Checkpoints(tmp_path, keep=1).save(1, TrainingState(small(1), random=False))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    for path in files:
        found = path.stat()
        assert synced.get(found.st_ino) == found.st_size, path
