"""The plugin among others: conformance, settings, presets, torch's own policy."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import Model, assert_same_values, sharded_toy, tokens_for
from torch import nn
from toy_models import loss_of

from polyshard import CPUOffloadPolicy, describe, fully_shard
from polyshard.errors import IneffectiveSettingWarning, PluginError, SettingError
from polyshard_offload import DiskSettings, Offload, cpu_offload
from polyshard_testing import PluginConformance, World, ranks


class TestHost(PluginConformance):
    host_waits = 2  # once a step for each of the optimizer's groups, which step on the host

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return cpu_offload


def on_disk() -> Offload:
    return Offload(params="disk", grads="disk", optimizer="disk")


class TestDisk(PluginConformance):
    kept_share = 200.0  # a window onto the files, as large for small models
    host_waits = 16  # files are read and written by the host: it waits for copies from the device

    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return on_disk

    @pytest.mark.thorough
    def test_order_on_a_device(self, factory: Callable[[], object], device_judge: object) -> None:
        """A minute; CI orders the copies of the host tier, and of a storage on disk alone."""
        super().test_order_on_a_device(factory, device_judge)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"params": "cpu"}, "Offload(params='cpu') must be one of 'device', 'host', 'disk'"),
    ({"grads": "host"}, "choose params='host' or 'disk'"),
    ({"params": "host", "grads": "device"}, "choose grads='host'"),
    ({"params": "host", "optimizer": "device"}, "choose optimizer='host' or 'disk'"),
    ({"params": "host", "grads": "disk", "optimizer": "host"}, "move optimizer='disk' first"),
    ({"fraction": 1.5}, "Offload(fraction=1.5) must be from 0 to 1"),
    ({"prefetch": -1}, "Offload(prefetch=-1) must be an integer of at least 0"),
    ({"prefetch": True}, "Offload(prefetch=True) must be an integer"),
    ({"chunk_bytes": 0}, "Offload(chunk_bytes=0) must be an integer of at least 1"),
    ({"pin": "yes"}, "Offload(pin='yes') must be one of True, False, 'auto'"),
    ({"disk": "/tmp"}, "must be DiskSettings(path=...), got a str"),
]


@pytest.mark.parametrize(("chosen", "text"), WRONG)
def test_impossible_settings_are_refused(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=re.escape(text)):
        Offload(**chosen)


WRONG_DISK: list[tuple[dict[str, Any], str]] = [
    ({"io_threads": 0}, "DiskSettings(io_threads=0) must be an integer of at least 1"),
    ({"block_bytes": 5000}, "must be a multiple of 4096"),
    ({"block_bytes": 512}, "at least 4096"),
    ({"direct": "maybe"}, "must be one of True, False, 'auto'"),
    ({"backend": "aio"}, "must be one of 'posix', 'kvikio'"),
]


@pytest.mark.parametrize(("chosen", "text"), WRONG_DISK)
def test_impossible_disk_settings_are_refused(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=re.escape(text)):
        DiskSettings(**chosen)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can pin")
def test_pinning_needs_an_accelerator() -> None:
    with pytest.raises(SettingError, match="no accelerator"):
        Offload(pin=True)


def test_tiers_left_out_are_beside_the_parameters() -> None:
    def tiers(offload: Offload) -> tuple[str | None, ...]:
        return offload.params, offload.grads, offload.optimizer

    assert tiers(Offload()) == ("device", "device", "device")
    assert tiers(Offload(params="disk")) == ("disk", "host", "host")
    assert tiers(Offload.cpu()) == tiers(cpu_offload()) == ("host", "host", "host")
    assert tiers(Offload.optimizer_only("disk")) == ("device", "device", "disk")
    assert tiers(Offload.on_disk("/tmp")) == ("disk", "disk", "disk")


def test_settings_travel_and_paths_may_differ(tmp_path: Path) -> None:
    """Ranks compare settings; where each rank's disk is mounted is its own business."""
    from polyshard.plugins.contract import settings_of

    offload = Offload(optimizer="disk", disk=DiskSettings(path=tmp_path))
    again = pickle.loads(pickle.dumps(offload))
    assert again.disk == offload.disk
    assert str(tmp_path) not in settings_of(offload)
    assert "optimizer='disk'" in settings_of(offload)


@ranks(2)
def test_torchs_policy_stands_for_the_preset(rank: int, size: int) -> None:
    """FSDP2's policy, by its own name, with an optimizer that is not wrapped."""
    models = []
    for keywords in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=True)}):
        torch.manual_seed(0)
        model = Model()
        for block in model.blocks:
            fully_shard(block, **keywords)  # type: ignore[call-overload]
        fully_shard(model, **keywords)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss_of(model, tokens_for(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same_values(*models)
    assert "storage host(gradients on host)" in str(describe(models[1]))


@ranks(2)
def test_the_name_stands_for_the_preset(rank: int, size: int) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, plugins=["offload"])
    assert "storage host" in str(describe(model))
    with pytest.raises(PluginError, match="offload"):
        fully_shard(nn.Linear(4, 4), plugins=["offload"], offload_policy=CPUOffloadPolicy())


def backwards(model: nn.Module, rank: int) -> None:
    for step in range(4):
        loss_of(model, tokens_for(step, rank)).backward()


@ranks(2)
def test_forgetting_to_wrap_is_told_once(rank: int, size: int) -> None:
    model = sharded_toy(Offload(optimizer="host"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IneffectiveSettingWarning)
        backwards(model, rank)
    (told,) = (w for w in caught if w.category is IneffectiveSettingWarning)
    assert "offload.wrap" in str(told.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", IneffectiveSettingWarning)
        backwards(sharded_toy(Offload.cpu()), rank)


@ranks(2)
def test_shards_leave_the_device(rank: int, size: int, tmp_path: Path) -> None:
    """The tiers are real: other memory, staging that goes, gradients that move."""
    path = str(tmp_path)
    for offload in (Offload.cpu(), Offload.on_disk(path)):
        model = sharded_toy(offload)
        tiers = offload.tiers
        optimizer = offload.wrap(torch.optim.AdamW(model.parameters()))
        for step in range(2):
            loss_of(model, tokens_for(step, rank)).backward()
            assert tiers.staging.bytes_now == 0  # nothing of the shards stays on the device
            optimizer.step()
            optimizer.zero_grad()
        assert tiers.staging.peak_bytes > 0
        assert tiers.step_staging.bytes_now == 0
        gradients = tiers.arenas.get(("gradients", torch.float32))
        assert gradients is None or (gradients.peak_bytes > 0 == gradients.taken_bytes)


@ranks(2)
def test_parameters_may_come_late_and_change_dtype(rank: int, size: int, tmp_path: Path) -> None:
    """Meta parameters get values after sharding; conversions move shards to new memory."""
    path = str(tmp_path)
    for offload in (Offload.cpu(), Offload.on_disk(path)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        for layer in model:
            fully_shard(layer, plugins=[offload])
        fully_shard(model, plugins=[offload])
        model.to_empty(device=torch.get_default_device())
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        assert model(torch.ones(1, 8)).tolist() == [[36.5] * 4]
        model.to(torch.float64)
        assert model(torch.ones(1, 8, dtype=torch.float64)).tolist() == [[36.5] * 4]
        model(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        optimizer = offload.wrap(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
        optimizer.step()
        bias: Any = model[1].bias
        assert bias.full_tensor().tolist() == [-0.5] * 4


# What describe() shows ------------------------------------------------------------------------


def shows(rank: int, size: int, path: str) -> None:
    disk = DiskSettings(path=Path(path), block_bytes=1 << 16)
    offload = Offload(params="host", optimizer="disk", disk=disk, prefetch=1, chunk_bytes=1)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        fully_shard(layer, plugins=[offload])
    fully_shard(model, plugins=[offload])
    before = str(describe(model))
    shard = 64 * 64 * 4 // size
    assert f"a shard of {shard:,} bytes on host, its gradient of {shard:,} bytes on host" in before
    both = 2 * shard
    line = f"{2 * both:,} bytes in all on host: gradients {both:,}, parameters {both:,}"
    assert before.count(line) == 1  # of all groups together, said once
    assert "optimizer state goes to disk once wrap() has the optimizer" in before
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters()))
    after = str(describe(model))
    assert f"{2 * both:,} bytes in all on disk: optimizer state {2 * both:,}" in after
    assert f"staging of shards {both:,}, step buffers {2 * both:,}" in after
    assert "once wrap()" not in after
    memory = offload.memory(optimizer)
    assert (memory.host, memory.disk, memory.buffers) == (2 * both, 2 * both, 2 * both)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert offload.measured_memory(optimizer).host == 2 * both
    del optimizer
    gc.collect()
    assert "once wrap()" in str(describe(model))  # the state went with the optimizer


def shows_on_the_device(rank: int, size: int) -> None:
    offload = Offload(optimizer="host")
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, plugins=[offload])
    assert "optimizer state goes to host once wrap() has the optimizer" in str(describe(model))
    optimizer = offload.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    nbytes = 64 * 64 * 4 // size
    text = str(describe(model))
    assert f"offload: {nbytes:,} bytes in all on host: optimizer state {nbytes:,}" in text
    assert offload.memory(optimizer).host == nbytes


def test_descriptions_show_every_tier(world2: World, tmp_path: Path) -> None:
    world2.run(shows, str(tmp_path))
    world2.run(shows_on_the_device)
