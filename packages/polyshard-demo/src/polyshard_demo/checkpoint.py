"""Where a run keeps its checkpoints, and what it has to know before it goes on from one.

On disk: ``<run>/run.json`` says what the run trains, as plain data, and ``<run>/checkpoints/``
holds what :class:`polyshard_checkpoint.Checkpoints` writes. The tensors are sharded by whoever
loads them, so any world size and engine can go on from them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyshard.files import replace_file
from polyshard_checkpoint import checkpoints_in
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus

__all__ = ["Source", "find_source", "folder_of", "has_checkpoints", "write_run"]

RECORD = "run.json"
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Source:
    """What a run goes on from.

    Attributes:
        run: the directory of the run that saved it.
        checkpoint: that one, or the newest intact one of the run.
        record: what the run trained: settings, and the text's name and digest.
    """

    run: Path
    checkpoint: Path | None
    record: Mapping[str, Any]

    def check(self, settings: Settings, corpus: Corpus) -> None:
        """Refuse to go on with another model or other data.

        Raises:
            DemoError: naming the difference.
        """
        settings.check_continues(self.record["settings"], self.run)
        if self.record["digest"] != corpus.digest:
            raise DemoError(
                f"cannot resume from {self.run}: it was trained on the text "
                f"{self.record['text']}, this is {corpus.name} (or another version of it); give "
                "the same --text"
            )


def folder_of(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / FOLDER


def write_run(settings: Settings, corpus: Corpus) -> None:
    """Note what is trained, for those who go on from it."""
    record = {"settings": settings.to_plain(), "text": corpus.name, "digest": corpus.digest}
    settings.out.mkdir(parents=True, exist_ok=True)
    replace_file(settings.out / RECORD, json.dumps(record, indent=1).encode())


def find_source(settings: Settings) -> Source | None:
    """What ``settings`` say to go on from: a run directory, or one of its checkpoints.

    Raises:
        DemoError: when there is nothing, unless ``settings.auto`` allows a fresh start.
    """
    path = settings.resume
    if path is None:
        return None
    if path.parent.name == FOLDER:
        run, checkpoint = path.parent.parent, path
        found = path.is_dir()
    else:
        run, checkpoint = path, None
        found = folder_of(path).is_dir() and any(folder_of(path).glob("step-*"))
    if found:
        return Source(run, checkpoint, _read(run / RECORD))
    if settings.auto:
        return None
    raise DemoError(
        f"--resume {path}: no checkpoint there; give a run directory (which has {FOLDER}/) or one "
        "of its step-* directories"
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(path.read_text())
        missing = {"settings", "text", "digest"} - set(record)
        if missing:
            raise ValueError(f"it does not say {', '.join(sorted(missing))}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DemoError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return dict(record)


def has_checkpoints(run: Path) -> bool:
    """Whether a run directory holds any that could be gone on from."""
    return bool(checkpoints_in(folder_of(run)))
