"""The folder that holds a run's checkpoints: names, order, completion, rotation.

[Note: whole or not at all]
A checkpoint is written into a folder beside its later name, under a name that cannot be guessed and
that no checkpoint has. When all files have reached the disk the manifest is written, and the folder
gets its name, which readers see as one step. A job that is killed before leaves a folder that is no
checkpoint, which the next save removes; one that is killed after has saved. No name is used twice,
so nothing is ever in the way of a new checkpoint, and older ones are removed last.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polyshard.errors import CheckpointError
from polyshard.files import sync_folder
from polyshard_checkpoint.manifest import Manifest

UNFINISHED = ".unfinished-"
PARTIAL = "partial-"
"""What begins the name of what is no checkpoint: only some of its ranks were left to save it."""
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
READABLE = 0o755


@dataclass(frozen=True)
class Folder:
    """The checkpoints of one run. Used by one rank."""

    path: Path

    def begin(self) -> Path:
        """A new, empty folder to write a checkpoint into; what killed jobs left is removed.

        Raises:
            OSError: when it cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{UNFINISHED}*"):
            _remove(left)
        return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.path))

    def complete(self, unfinished: Path, manifest: Manifest) -> Path:
        """Make a checkpoint of what was written; returns where it is.

        Raises:
            OSError: when it cannot be made.
        """
        manifest.write(unfinished)
        unfinished.chmod(READABLE)
        sync_folder(unfinished)
        final = self._free_name(f"{PARTIAL if manifest.missing else ''}step-{manifest.step:06d}")
        unfinished.rename(final)
        sync_folder(self.path)
        return final

    def _free_name(self, name: str) -> Path:
        final, again = self.path / name, 1
        while os.path.lexists(final):
            again += 1
            final = self.path / f"{name}.{again}"
        return final

    def found(self) -> tuple[list[Path], list[str]]:
        """Checkpoints with an intact manifest, newest first; and what is wrong with the others."""
        intact, damaged = self._ordered()
        return [path for _, path in intact], damaged

    def next_order(self) -> int:
        """The order of a checkpoint that is saved now."""
        intact, _ = self._ordered()
        return intact[0][0] + 1 if intact else 0

    def _ordered(self) -> tuple[list[tuple[int, Path]], list[str]]:
        """Each is read once: other programs may take it away at any time."""
        intact, damaged = [], []
        for path in self._named():
            try:
                intact.append((Manifest.read(path).order, path))
            except CheckpointError as error:
                damaged.append(f"{path.name}: {error}")
        return sorted(intact, reverse=True), damaged

    def rotate(self, keep: int, damaged: Iterable[Path]) -> None:
        """Remove all but the newest ``keep``; those known to be ``damaged`` do not count as any."""
        known = set(damaged)
        intact = [path for path in self.found()[0] if path not in known]
        for path in intact[keep:]:
            _remove(path)

    def _named(self) -> list[Path]:
        try:
            found = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        return sorted(found)


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, newest first, as far as their manifests say."""
    return Folder(Path(folder)).found()[0]


def _remove(path: Path) -> None:
    """Take away a folder; first its name, so that half of it is never taken for the whole."""
    if path.is_symlink():  # what it points to is not ours
        return
    with suppress(OSError):
        if not path.name.startswith(UNFINISHED):
            gone = path.with_name(f"{UNFINISHED}{path.name}-removed")
            path.rename(gone)
            path = gone
        shutil.rmtree(path)
