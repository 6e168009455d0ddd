"""Versions as folders of safetensors: whole, loaded by others, damaged ones named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_runs import full, rounded, same_bits, small
from safetensors.torch import load_file
from torch import nn

from polyshard_publish import (
    FolderTarget,
    GoneError,
    ProofError,
    Publisher,
    PublishError,
    VersionError,
    folder,
    load_version,
)
from polyshard_testing import ranks


@ranks(2)
def test_versions_are_folders_that_others_load(rank: int, size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    told: list[tuple[Path, int]] = []
    target = FolderTarget(
        tmp_path / "versions",
        files=[tmp_path / "config.json"],
        notify=lambda path, version: told.append((path, version)),
        file_bytes=4000,
    )
    model = small()
    with Publisher(model, to=target, dtype=torch.bfloat16) as publisher:
        for version in (1, 2, 3):
            publisher.publish(version)
        with pytest.raises(VersionError, match="version 3 is not newer than 3"):
            publisher.publish(3)
    wanted = rounded(full(model), torch.bfloat16)
    del wanted["head.weight"]
    final = tmp_path / "versions" / "version-000003"
    assert [v for _, v in told] == ([1, 2, 3] if rank == 0 else [])
    index = json.loads((final / "model.safetensors.index.json").read_text())["weight_map"]
    found = {n: t for name in set(index.values()) for n, t in load_file(final / name).items()}
    for read in (found, load_version(tmp_path / "versions").tensors):
        assert read.keys() == wanted.keys() == index.keys()
        assert all(same_bits(read[name], wanted[name]) for name in read)
    torch.distributed.barrier()
    kept = sorted(path.name for path in (tmp_path / "versions").iterdir())
    assert kept == ["LATEST", "version-000002", "version-000003"]
    assert (final / "config.json").read_text() == "{}"


def test_a_version_is_served_though_telling_of_it_failed(tmp_path: Path) -> None:
    def fails(path: Path, version: int) -> None:
        raise OSError("the webhook is down")

    target = FolderTarget(tmp_path, notify=fails)
    with (
        Publisher(nn.Linear(2, 2), to=target) as publisher,
        pytest.warns(RuntimeWarning, match=r"version 7 is served, but notify\(\) failed: OSError"),
    ):
        publisher.publish(7)
    assert load_version(tmp_path).version == 7


def test_a_version_that_was_never_served_does_not_block_its_number(tmp_path: Path) -> None:
    """A trainer was killed between the version's name and that of the latest."""
    Publisher(nn.Linear(2, 2), to=tmp_path).publish(1)
    (tmp_path / "version-000002").mkdir()
    Publisher(nn.Linear(2, 2), to=tmp_path).publish(2)
    assert load_version(tmp_path).version == 2


def test_what_was_never_served_is_not_kept_instead_of_what_is(tmp_path: Path) -> None:
    publisher = Publisher(nn.Linear(2, 2), to=FolderTarget(tmp_path, keep=1))
    publisher.publish(10)
    (tmp_path / "version-000020").mkdir()  # a trainer was killed before it named this the latest
    publisher.publish(11)
    assert load_version(tmp_path).version == 11
    assert not (tmp_path / "version-000010").exists()


def test_damaged_versions_are_named(tmp_path: Path) -> None:
    with pytest.raises(GoneError, match="no version was published"):
        load_version(tmp_path)
    Publisher(nn.Linear(30, 20), to=tmp_path).publish(1)
    file = tmp_path / "version-000001" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ProofError, match="other values than were published in 'weight'"):
        load_version(tmp_path)
    (tmp_path / "version-000001" / "polyshard-version.json").write_text("[]")
    with pytest.raises(PublishError, match="is no manifest"):
        load_version(tmp_path)
    (tmp_path / "LATEST").write_text("../elsewhere")
    with pytest.raises(PublishError, match="which is no version"):
        load_version(tmp_path)


def test_a_version_that_is_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its manifest and its files."""
    publisher, read = (
        Publisher(nn.Linear(3, 2), to=FolderTarget(tmp_path, keep=1)),
        folder._manifest,
    )
    publisher.publish(1)
    versions = iter([2])

    def manifest(path: Path) -> dict[str, Any]:
        found = read(path)
        if (version := next(versions, None)) is not None:
            publisher.publish(version)
        return found

    monkeypatch.setattr(folder, "_manifest", manifest)
    assert load_version(tmp_path).version == 2


def test_what_a_killed_trainer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-dead").mkdir()
    Publisher(nn.Linear(3, 2), to=tmp_path).publish(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "version-000001"]


def test_versions_count_past_a_million(tmp_path: Path) -> None:
    publisher = Publisher(nn.Linear(3, 2), to=FolderTarget(tmp_path, keep=1))
    for version in (999_999, 1_000_000):
        publisher.publish(version)
        assert load_version(tmp_path).version == version


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="version 1 was not taken"):
        Publisher(nn.Linear(3, 2), to=tmp_path / "file" / "folder").publish(1)
