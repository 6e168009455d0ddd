"""A folder of versions, each a folder of safetensors files that Hugging Face's libraries load.

``version-000007/`` holds ``model.safetensors`` (or several with an index), whatever ``files`` the
publisher was told to put beside it, and ``polyshard-version.json`` with the digest of every tensor.
It gets its name when all of it has reached the disk, and then ``LATEST`` says the name: readers of
that file, and what ``notify`` calls, find a whole version. A version holds all weights: files are
never patched.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyshard.errors import CheckpointError
from polyshard.files import replace_file, sync_folder
from polyshard_checkpoint.safetensors.blocks import fill, put, whole_view
from polyshard_checkpoint.safetensors.header import Stored, read_header
from polyshard_checkpoint.safetensors.model import FILE_BYTES
from polyshard_checkpoint.safetensors.writing import file_groups, make_file
from polyshard_publish.digests import digest_of, summary
from polyshard_publish.errors import GoneError, ProofError, PublishError, VersionError
from polyshard_publish.patches import Patch
from polyshard_publish.receiver import Served, named
from polyshard_publish.wire import Have, Update

MANIFEST, LATEST = "polyshard-version.json", "LATEST"
FORMAT = 1
UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class FolderTarget:
    """Versions as files, for whatever loads safetensors; all ranks see the folder.

    Attributes:
        folder: made if it is not there.
        keep: how many versions stay; older ones are removed.
        files: copied into each version: the configuration, the tokenizer.
        notify: called on rank 0 with the folder of each version and its number. An exception is a
            warning: the version is served by then.
        file_bytes: how large a file may be, unless it holds a single tensor.
    """

    folder: str | os.PathLike[str]
    keep: int = 2
    files: Sequence[str | os.PathLike[str]] = ()
    notify: Callable[[Path, int], None] | None = None
    file_bytes: int = FILE_BYTES

    takes_patches: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """For errors and reports."""
        return str(self.folder)

    def open(self) -> _FolderSending:
        """What writes this rank's part of one version."""
        return _FolderSending(self)


class _FolderSending:
    """Has the methods of :class:`~polyshard_publish.targets.SocketSending`."""

    _update: Update
    _rank = -1

    def __init__(self, target: FolderTarget) -> None:
        self._target, self._path = target, Path(target.folder)
        self._stored: dict[str, tuple[int, Stored]] = {}
        self._open: list[int] = []
        self.sent_bytes = 0

    @property
    def _place(self) -> Path:
        return self._path / f"{UNFINISHED}{self._update.nonce}"

    def have(self) -> Have:
        found = latest(self._path)
        if found is None:
            return Have(None)
        said = _manifest(found)
        return Have(said["version"], summary(said["digests"]))

    def begin(self, update: Update, rank: int) -> None:
        self._update, self._rank = update, rank
        if not rank:
            have = self.have().version
            if have is not None and update.version <= have:
                raise VersionError(
                    f"version {update.version} is not newer than {have}, the latest."
                )
            self._make()
        for path in sorted(self._place.glob("*.safetensors")):
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            self._open.append(file)
            self._stored |= {name: (file, stored) for name, stored in read_header(path).items()}

    def _make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(f"{UNFINISHED}*"):  # of a trainer that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._place.mkdir()
        tensors = {
            name: (entry.torch_dtype, torch.Size(entry.shape))
            for name, entry in sorted(self._update.catalogue.items())
        }
        groups = list(file_groups(tensors, self._target.file_bytes))
        index: dict[str, str] = {}
        for number, names in enumerate(groups, 1):
            called = f"model-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else "model"
            make_file(self._place / f"{called}.safetensors", {n: tensors[n] for n in names})
            index |= dict.fromkeys(names, f"{called}.safetensors")
        if len(groups) > 1:
            total = sum(shape.numel() * dtype.itemsize for dtype, shape in tensors.values())
            content = {"metadata": {"total_size": total}, "weight_map": index}
            replace_file(self._place / "model.safetensors.index.json", json.dumps(content).encode())
        for extra in self._target.files:
            shutil.copy(extra, self._place)

    def send(self, patch: Patch) -> None:
        file, stored = self._stored[patch.name]
        view = whole_view(stored)[patch.block.slices()]
        put(patch.values.view(patch.block.sizes), view, stored, file)
        self.sent_bytes += patch.nbytes

    def end(self) -> None:
        for file in self._open:
            os.fsync(file)

    def commit(self, digests: Mapping[str, int]) -> None:
        version, catalogue = self._update.version, self._update.catalogue
        content = {
            "format": FORMAT,
            "version": version,
            "tensors": {name: asdict(entry) for name, entry in catalogue.items()},
            "digests": dict(digests),
        }
        replace_file(self._place / MANIFEST, json.dumps(content, indent=1).encode())
        final = self._path / f"version-{version:06d}"
        if final.exists():
            have = self.have().version
            if have is not None and have >= version:
                raise VersionError(f"'{final}' is there already; it is left as it is.")
            # A trainer was killed, or its disk was full, before the version was served.
            shutil.rmtree(final)
        self._place.rename(final)
        sync_folder(self._path)
        replace_file(self._path / LATEST, final.name.encode())
        kept = sorted(self._path.glob("version-*"), key=lambda path: (len(path.name), path.name))
        # What is newer was not served: a trainer was killed before that.
        for old in kept[: kept.index(final) + 1][: -max(1, self._target.keep)]:
            shutil.rmtree(old, ignore_errors=True)
        if self._target.notify is not None:
            try:
                self._target.notify(final, version)
            except Exception as error:  # the version is served: ranks must not be told otherwise
                problem = f"{type(error).__name__}: {error}"
                said = f"version {version} is served, but notify() failed: {problem}"
                warnings.warn(said, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
        if not self._rank:  # what was committed has another name
            shutil.rmtree(self._place, ignore_errors=True)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest version that is whole; ``None`` before the first."""
    path = Path(folder)
    try:
        found = path / (path / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if found.parent != path or not found.name.startswith("version-"):
        raise PublishError(f"'{path / LATEST}' names '{found.name}', which is no version.")
    return found


def load_version(folder: str | os.PathLike[str]) -> Served:
    """The newest version in a folder, with every tensor's digest proven.

    Raises:
        GoneError: when there is none.
        ProofError: naming tensors that are not what was published.
    """
    for _ in range(3):  # versions are removed, newer ones come
        found = latest(folder)
        if found is None:
            raise GoneError(f"no version was published to '{folder}' yet.")
        try:
            return _loaded(found)
        except FileNotFoundError:
            continue
        except (ProofError, CheckpointError):
            if latest(folder) == found:  # else it was being removed
                raise
    raise GoneError(f"versions in '{folder}' are removed faster than they are read; raise keep=.")


def _loaded(path: Path) -> Served:
    said = _manifest(path)
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as content:
            for name, stored in read_header(file).items():
                tensors[name] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
                fill(tensors[name], whole_view(stored), stored, content.fileno())
    digests: dict[str, int] = said["digests"]
    wrong = sorted(set(digests) ^ set(tensors))
    wrong += sorted(n for n in set(digests) & set(tensors) if digest_of(tensors[n]) != digests[n])
    if wrong:
        raise ProofError(f"'{path}' holds other values than were published in {named(wrong)}.")
    return Served(said["version"], tensors, frozenset(tensors))


def _manifest(path: Path) -> dict[str, Any]:
    content = (path / MANIFEST).read_bytes()
    try:
        found: dict[str, Any] = json.loads(content)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, not {FORMAT}")
        return {"version": int(found["version"]), "digests": dict(found["digests"])}
    except (ValueError, TypeError, KeyError) as error:
        raise PublishError(f"'{path / MANIFEST}' is no manifest of a version: {error}") from error
