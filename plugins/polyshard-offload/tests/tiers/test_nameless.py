"""Swap files in directories that everybody may write to: what others plant there is left alone."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swap_toys import BLOCK, noise, swap

from polyshard_offload import StorageError
from polyshard_offload.tiers import nameless
from polyshard_offload.tiers.nameless import PREFIX, open_nameless


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.fixture
def no_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems: a file needs a name while it is made."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def left_by(pid: int, folder: Path, name: str = "abc") -> Path:
    return folder / f"{PREFIX}{socket.gethostname()}-{pid}-{name}"


def precious(folder: Path) -> list[Path]:
    folder.mkdir()
    files = [folder / name for name in ("swap", "thesis", ".nfs0001")]
    for file in files:
        file.write_text("irreplaceable")
    return files


def test_a_planted_link_to_a_directory_is_not_followed(tmp_path: Path, dead: int) -> None:
    files = precious(tmp_path / "home")
    (tmp_path / "scratch").mkdir()
    link = left_by(dead, tmp_path / "scratch")
    link.symlink_to(tmp_path / "home")
    swap(tmp_path / "scratch")
    assert [f.read_text() for f in files] == ["irreplaceable"] * 3
    assert link.is_symlink()


def test_a_directory_that_others_may_write_to_is_left_alone(tmp_path: Path, dead: int) -> None:
    files = precious(left_by(dead, tmp_path))
    left_by(dead, tmp_path).chmod(0o777)
    swap(tmp_path)
    assert [f.read_text() for f in files] == ["irreplaceable"] * 3


def test_a_directory_of_somebody_else_is_left_alone(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = precious(left_by(dead, tmp_path))
    left_by(dead, tmp_path).chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    nameless.remove_abandoned(tmp_path)
    assert [f.read_text() for f in files] == ["irreplaceable"] * 3


def test_only_what_swap_files_leave_is_removed(tmp_path: Path, dead: int) -> None:
    """Also from a directory of ours; and a link there goes, not what it points to."""
    target = tmp_path / "target"
    target.write_text("irreplaceable")
    mine, odd = left_by(dead, tmp_path, "mine"), left_by(dead, tmp_path, "odd")
    for folder in (mine, odd):
        folder.mkdir(mode=0o700)
    (mine / "swap").symlink_to(target)
    (mine / ".nfs0001").touch()
    (odd / "thesis").write_text("irreplaceable")
    nameless.remove_abandoned(tmp_path)
    assert target.read_text() == "irreplaceable"
    assert not mine.exists()
    assert (odd / "thesis").read_text() == "irreplaceable"


def test_files_are_private_and_never_had_a_name(tmp_path: Path) -> None:
    descriptor = open_nameless(tmp_path)
    found = os.fstat(descriptor)
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (0, 0o600)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.usefixtures("no_nameless_files")
def test_where_a_file_needs_a_name_first(tmp_path: Path) -> None:
    file = swap(tmp_path)
    offset = file.allocate(BLOCK)
    file.write(offset, noise(BLOCK))
    target = torch.zeros(BLOCK, dtype=torch.uint8)
    file.read(offset, target)
    assert torch.equal(target, noise(BLOCK))
    found = os.fstat(file.descriptor)
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (0, 0o600)
    assert not os.get_inheritable(file.descriptor)
    assert list(tmp_path.iterdir()) == []


def planted(folder: Path, home: Path) -> Callable[..., None]:
    """What makes directories, and loses a race each time: another user puts links there."""

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        del mode, dir_fd
        (folder / name).symlink_to(home)

    return mkdir


@pytest.mark.usefixtures("no_nameless_files")
def test_a_directory_swapped_for_a_link_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for folder in (home, scratch):
        folder.mkdir()
    monkeypatch.setattr(os, "mkdir", planted(scratch, home))
    with pytest.raises(StorageError, match="rank 3: creating a file for things"):
        swap(scratch)
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("no_nameless_files")
def test_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = os.mkdir

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        seen.append(name.rpartition("-")[2])
        real(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    for _ in range(3):
        os.close(open_nameless(tmp_path))
    assert len(set(seen)) == 3
    assert all(len(name) >= 16 for name in seen)
