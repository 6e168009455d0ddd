"""Shards rest in files that no other process sees, and training does not notice."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from polyshard import fully_shard
from polyshard_gallery.mapped_storage import MappedStorage
from polyshard_testing import PluginConformance, ranks


class TestConformance(PluginConformance):
    host_waits = 8  # the host reads and writes the files

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return MappedStorage


def mappings(folder: str) -> list[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return [line for line in maps.splitlines() if folder in line]


@ranks(2)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_shards_rest_in_files_without_a_name(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Linear(512, 512)
        fully_shard(model, plugins=[MappedStorage(folder)])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert list(Path(folder).iterdir()) == []
        (line,) = mappings(folder)
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        assert isinstance(model.weight, DTensor)
        assert begin <= model.weight.to_local().data_ptr() < end
        assert line.endswith("(deleted)")


@ranks(2)
def test_parameters_may_come_later(rank: int, size: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(16, 16)
    fully_shard(model, plugins=[MappedStorage()])
    model.to_empty(device=torch.get_default_device())
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 16)), torch.full((1, 16), 16.0))
