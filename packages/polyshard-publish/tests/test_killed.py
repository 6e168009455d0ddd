"""Senders and receivers killed at any moment: what is served is one version, whole."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from publish_runs import Generator, same_bits
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard import fully_shard
from polyshard_publish import GoneError, Publisher, PublishError, SocketTarget, load_version

RATE = 4e6
"""Bytes a second: all weights take a tenth of one."""
SECONDS = 60.0


def model_of(version: int) -> nn.Module:
    """What a version is; every second one differs from the one before in few elements."""
    torch.manual_seed(version // 2)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.LayerNorm(256))
    if version % 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[version % 200] += version
    return model


def wanted(version: int) -> dict[str, Tensor]:
    return {name: value.bfloat16() for name, value in model_of(version).state_dict().items()}


def train(rank: int, size: int, store: str, address: str, folder: str, first: int) -> None:
    """Publish one version after the other, whatever becomes of the receiver."""
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, size), rank=rank, world_size=size
        )
    model = model_of(first)
    if size > 1:
        fully_shard(model)
    target = SocketTarget(address, bytes_per_second=RATE / size)
    publisher = Publisher(model, to=[target, Path(folder)], dtype=torch.bfloat16, keep="values")
    for version in itertools.count(first):
        for name, value in model_of(version).state_dict().items():
            parameter = model.get_parameter(name).detach()
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(value.chunk(size)[rank])
            else:
                parameter.copy_(value)
        try:
            publisher.publish(version)
        except PublishError:
            time.sleep(0.01)


def started(size: int, tmp_path: Path, address: str, first: int) -> list[BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    store = str(tmp_path / f"store-{first}")
    found: list[BaseProcess] = []
    for rank in range(size):
        args = (rank, size, store, address, str(tmp_path / "versions"), first)
        found.append(context.Process(target=train, args=args, daemon=True))
        found[-1].start()
    return found


def kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check(version: int | None, tensors: dict[str, Tensor]) -> None:
    """One version, to the bit, or nothing."""
    if version is None:
        assert not tensors
        return
    expected = wanted(version)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(tensors[name], tensor), (version, name)


def newest(folder: Path) -> int:
    """The version in ``folder``, to the bit; 0 where none was published before a kill."""
    try:
        served = load_version(folder)
    except GoneError:
        return 0
    check(served.version, dict(served.tensors))
    return served.version


@pytest.mark.sampled(16)
@pytest.mark.parametrize("trial", range(50))
def test_a_kill_never_leaves_a_mixture(trial: int, tmp_path: Path) -> None:
    """Even trials kill a sender, odd ones the receiver; every third has two ranks."""
    chosen = random.Random(trial)
    size, versions = 1 + (trial % 3 == 0), tmp_path / "versions"
    with Generator() as generator:
        trainers = started(size, tmp_path, generator.address, 1)
        try:
            until(lambda: (generator.serves()[0] or 0) >= 1 + trial % 4)
            time.sleep(chosen.uniform(0, 0.3))
            if trial % 2:
                generator.kill()
                generator.start()
                before = newest(versions)
                until(lambda: generator.serves()[0] is not None)
                until(lambda: newest(versions) > before)  # the other one continues
            else:
                chosen.choice(trainers).kill()
                time.sleep(0.1)
                version, tensors = generator.serves()
                check(version, tensors)
                kill(trainers)
                first = 2 + max(version or 0, newest(versions))
                trainers = started(size, tmp_path, generator.address, first)
                until(lambda: (generator.serves()[0] or 0) >= first)
            check(*generator.serves())
            until(lambda: newest(versions) > 0)
        finally:
            kill(trainers)
