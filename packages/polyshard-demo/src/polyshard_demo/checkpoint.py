"""Where a run keeps its checkpoints, and what has to fit before a run resumes from one.

On disk: ``<run>/run.json`` says what the run trains, as plain data, and ``<run>/checkpoints/``
holds what :class:`polyshard_checkpoint.Checkpoints` writes. The run that loads the tensors shards
them, so any world size and engine can resume from them.
"""

import json
from pathlib import Path

from polyshard.errors import CheckpointError
from polyshard.files import replace_file
from polyshard_checkpoint import Checkpoints, Restored, TrainingState, checkpoints_in
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import AUTO, Settings
from polyshard_demo.text import Corpus

__all__ = ["check_continues", "find_source", "folder_of", "restore", "run_of", "write_run"]

RECORD, FOLDER = "run.json", "checkpoints"
FIXED = ("preset", "tied", "dropout", "batch", "sequence", "seed", "reproducible")
"""What a resumed run keeps: its model and its data."""


def folder_of(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / FOLDER


def run_of(path: Path) -> Path:
    """The run directory that ``path``, a run directory or one of its checkpoints, belongs to."""
    return path.parent.parent if path.parent.name == FOLDER else path


def write_run(settings: Settings, corpus: Corpus) -> None:
    """Note what is trained, for runs that resume from it."""
    record = {"settings": settings.to_plain(), "text": corpus.name, "digest": corpus.digest}
    settings.out.mkdir(parents=True, exist_ok=True)
    replace_file(settings.out / RECORD, json.dumps(record, indent=1).encode())


def find_source(settings: Settings, corpus: Corpus) -> Path | None:
    """What a run resumes from: a run directory, or one of its checkpoints.

    Raises:
        DemoError: where there is nothing, or another model or other data was trained; for a run in
            the directory of an older one.
    """
    path = settings.out if settings.resume == AUTO else settings.resume
    run = None if path is None else run_of(path)
    is_other = run is None or run.resolve() != settings.out.resolve()
    if is_other and checkpoints_in(folder_of(settings.out)):  # which it would replace
        raise DemoError(
            f"--out {settings.out} already holds checkpoints; resume from them with "
            f"--resume {settings.out}, or give another --out"
        )
    if path is None or run is None:
        return None
    if path.is_dir() and (path != run or any(folder_of(run).glob("step-*"))):
        check_continues(run, settings, corpus)
        return path
    if settings.resume == AUTO:
        return None
    raise DemoError(
        f"--resume {path}: no checkpoint there; give a run directory (which has {FOLDER}/) or one "
        "of its step-* directories"
    )


def restore(settings: Settings, corpus: Corpus, state: TrainingState) -> Restored | None:
    """Fill ``state`` from what :func:`find_source` finds: the newest intact one of several.

    Raises:
        DemoError: when it does not fit, or none is intact; as :func:`find_source`.
    """
    if (source := find_source(settings, corpus)) is None:
        return None
    run = run_of(source)
    try:
        return Checkpoints(folder_of(run)).load(state, None if source == run else source)
    except CheckpointError as error:
        raise DemoError(f"cannot resume from {run}: {error}") from error


def check_continues(run: Path, settings: Settings, corpus: Corpus) -> None:
    """Refuse to resume from a run whose model or data differ.

    Ranks, engine, precision, micro-batches, learning rate and length may change.

    Raises:
        DemoError: naming every difference; or why the run's record cannot be read.
    """
    path = run / RECORD
    try:
        record = json.loads(path.read_text())
        saved, digest, text = record["settings"], record["digest"], record["text"]
        # What an older version did not write it did not have: then it is as if left out.
        before = {name: saved.get(name, getattr(Settings, name)) for name in FIXED}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DemoError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    wrong = [
        f"--{name}: saved {value!r}, now {getattr(settings, name)!r}"
        for name, value in before.items()
        if value != getattr(settings, name)
    ]
    if digest != corpus.digest:
        wrong.append(f"--text: saved {text}, now {corpus.name} or another version of it")
    if wrong:
        raise DemoError(
            f"cannot resume from {run}, it was written with other settings:\n  "
            + "\n  ".join(wrong)
            + "\npass the saved values, or start a new run without --resume"
        )
