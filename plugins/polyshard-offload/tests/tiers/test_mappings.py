"""Mappings of a swap file: what they take, and where they may begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from swap_toys import noise, swap

from polyshard_offload.tiers.file_map import FileMap
from polyshard_offload.tiers.private_window import PrivateWindow


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_windows_hold_no_file_descriptor(tmp_path: Path) -> None:
    """A model has more parameters than many processes may have files open."""
    file = swap(tmp_path)
    offsets = [file.allocate(4096) for _ in range(64)]
    before = open_files()
    windows = [file.window(offset, 4096) for offset in offsets]
    private = [PrivateWindow.of_file(file.descriptor, offset, 4096) for offset in offsets]
    assert open_files() < before + len(offsets)  # what tests before have left may go meanwhile
    for index, (shared, own) in enumerate(zip(windows, private, strict=True)):
        shared.copy_(noise(4096, index))
        assert torch.equal(own.memory, noise(4096, index))


def mapped_bytes(address: int) -> int:
    """Bytes of the mapping at ``address``; 0 where there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        start, stop = (int(bound, 16) for bound in line.split(" ", 1)[0].split("-"))
        if start <= address < stop:
            return stop - start
    return 0


def test_windows_are_unmapped_with_their_last_view(tmp_path: Path) -> None:
    file = swap(tmp_path)
    offset = file.allocate(3 << 20)
    window = file.window(offset, 3 << 20)
    address, part = window.data_ptr(), window[5:]
    del window, file
    part.fill_(7)
    assert mapped_bytes(address) == 3 << 20
    del part
    assert mapped_bytes(address) != 3 << 20


def test_what_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "pages", "w+b") as file, pytest.raises(OSError, match="Invalid argument"):
        FileMap(file.fileno(), 1, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileMap(1 << 20, 0, 4096)


LARGE_PAGES = """
import mmap, sys
mmap.ALLOCATIONGRANULARITY = 1 << 16  # what Linux says on machines with pages of 64 KiB

import torch
from torch import nn
from polyshard_offload import DiskSettings, Offload
from polyshard_offload.tiers import file_map

original = file_map.FileMap.__init__

def strict(self, descriptor, offset, nbytes, *rest, **named):
    assert offset % (1 << 16) == 0, offset
    original(self, descriptor, offset, nbytes, *rest, **named)

file_map.FileMap.__init__ = strict
params = [nn.Parameter(torch.ones(40, 5)) for _ in range(4)]
offload = Offload(optimizer="disk", disk=DiskSettings(path=sys.argv[1]), chunk_bytes=2000)
optimizer = offload.wrap(torch.optim.Adam(params))
for _ in range(3):
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
assert all(float(optimizer.state[p]["exp_avg"].max()) > 0 for p in params)
print("done")
"""


def test_large_pages(tmp_path: Path) -> None:
    """Places in a file begin where it can be mapped."""
    command = [sys.executable, "-c", LARGE_PAGES, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["done"]
