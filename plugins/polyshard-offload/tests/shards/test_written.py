"""Parameters at rest may be written by anybody between steps; the next forward computes with that.

Most of these ways bump no version counter of a ``DTensor``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard import describe, fully_shard
from polyshard_offload import CorruptedError, DiskSettings, Offload
from polyshard_offload.tiers import private_window
from polyshard_offload.tiers.private_window import PrivateWindow, writes_show
from polyshard_testing import ranks

Write = Callable[[Any, list[nn.Parameter], int], None]


def step_with(kind: type[torch.optim.Optimizer], **how: Any) -> Write:
    def write(model: Any, parameters: list[nn.Parameter], size: int) -> None:
        optimizer = kind(parameters, lr=0.05, **how)  # type: ignore[call-arg]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter.detach(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return write


def average(model: Any, parameters: list[nn.Parameter], size: int) -> None:
    values = [p.detach() for p in parameters]
    torch._foreach_lerp_(values, [torch.ones_like(v) for v in values], 0.25)


def local_parts(parameters: list[nn.Parameter], size: int) -> list[Tensor]:
    parts: list[Tensor] = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            local: Any = parameter.data
            parts.append(local.to_local())
        else:
            parts.extend(parameter.data.chunk(size))
    return parts


def permute_rows(model: Any, parameters: list[nn.Parameter], size: int) -> None:
    for part in local_parts(parameters, size):
        part.copy_(part.flip(0).clone())


def one_element(model: Any, parameters: list[nn.Parameter], size: int) -> None:
    for part in local_parts(parameters[:1], size):
        part[0, 0] = 2.0


def copy_in_place(model: Any, parameters: list[nn.Parameter], size: int) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 1.25)


def load(model: Any, parameters: list[nn.Parameter], size: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


WRITERS: dict[str, Write] = {
    "adamw-foreach": step_with(torch.optim.AdamW, foreach=True),
    "adamw-fused": step_with(torch.optim.AdamW, fused=True),
    "sgd-foreach": step_with(torch.optim.SGD, foreach=True),
    "average": average,
    "rows": permute_rows,
    "one element": one_element,
    "copy": copy_in_place,
    "load": load,
}
X = torch.ones(2, 48)


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))


def sharded(path: str, tier: str, *, checksums: bool, **kwargs: Any) -> tuple[Any, Offload]:
    disk = DiskSettings(path=Path(path), checksums=checksums)
    offload = Offload(params=tier, grads=tier, optimizer=tier, disk=disk)  # type: ignore[arg-type]
    model = make()
    for layer in model:
        fully_shard(layer, plugins=[offload], **kwargs)
    fully_shard(model, plugins=[offload], **kwargs)
    return model, offload


def forward(model: Any, *, trains: bool) -> Tensor:
    with torch.set_grad_enabled(trains):
        out: Tensor = model(X)
        if trains:
            out.square().sum().backward()
            model.zero_grad()
    return out.detach()


def told(when: str) -> Callable[[str], str]:
    return lambda text: f"{when}: {text}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(2)
def test_what_was_written_is_computed_with(
    rank: int, size: int, tmp_path: Path, tier: str, checksums: bool
) -> None:
    path = str(tmp_path)
    for reshard in (True, False):
        model, _ = sharded(path, tier, checksums=checksums, reshard_after_forward=reshard)
        parameters, plain = list(model.parameters()), make()
        for name, write in WRITERS.items():
            for trains in (True, False):  # so that an order is known, and shards are read ahead
                ours, wanted = (forward(m, trains=trains) for m in (model, plain))
                torch.testing.assert_close(ours, wanted, msg=told(f"before {name}"))
                write(model, parameters, size)
                write(plain, list(plain.parameters()), size)
                ours, wanted = (forward(m, trains=trains) for m in (model, plain))
                torch.testing.assert_close(ours, wanted, msg=told(f"after {name}"))


@ranks(1)
def test_corruption_is_told_from_writes(rank: int, size: int, tmp_path: Path) -> None:
    """Beside what users write: in a parameter that they did not write to, and later in others."""
    path = str(tmp_path)
    model, offload = sharded(path, "disk", checksums=True)
    forward(model, trains=True)
    for write in (average, permute_rows):
        write(model, list(model[1].parameters()), size)
        forward(model, trains=True)
    file = offload.tiers.files["parameters"]
    average(model, list(model[1].parameters()), size)
    bad = torch.full((4096,), 7, dtype=torch.uint8)
    file.write(4096, bad)
    with pytest.raises(CorruptedError, match="parameters at byte 4096"):
        forward(model, trains=False)


@ranks(1)
def test_reading_vouches_for_nothing(rank: int, size: int, tmp_path: Path) -> None:
    """What was written is checked from the first read on, looking at it changes nothing."""
    path = str(tmp_path)
    model, offload = sharded(path, "disk", checksums=True)
    average(model, list(model.parameters()), size)
    forward(model, trains=False)
    total = sum(part.sum() for part in local_parts(list(model.parameters()), size))
    assert isinstance(total, Tensor)
    assert torch.isfinite(total)
    offload.tiers.files["parameters"].write(4096, torch.full((4096,), 7, dtype=torch.uint8))
    with pytest.raises(CorruptedError, match="parameters at byte 4096"):
        forward(model, trains=False)


@ranks(2)
def test_kernels_that_do_not_tell(rank: int, size: int, tmp_path: Path) -> None:
    """Then no write is taken for corruption, and describe() says what is not checked."""
    path = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyshard_offload.tiers.swap_file.writes_show", lambda: False)
        patch.setattr("polyshard_offload.report.writes_show", lambda: False)
        model, _ = sharded(path, "disk", checksums=True)
        plain = make()
        for name, write in WRITERS.items():
            write(model, list(model.parameters()), size)
            write(plain, list(plain.parameters()), size)
            for trains in (False, True):
                ours, wanted = (forward(m, trains=trains) for m in (model, plain))
                torch.testing.assert_close(ours, wanted, msg=told(f"after {name}"))
        assert "checksums of parameters are not kept" in str(describe(model))


@pytest.mark.skipif(not writes_show(), reason="this kernel does not say what was written to")
def test_a_private_window_knows_its_pages(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * page))
    with path.open("r+b") as file:
        window = PrivateWindow.of_file(file.fileno(), 0, 8 * page)
        assert int(window.memory.sum()) == 0
        assert window.written() == []
        for index in (page, 2 * page + 5, 6 * page):
            window.memory[index] = 1
        assert window.written() == [(page, 3 * page), (6 * page, 7 * page)]
        os.pwrite(file.fileno(), b"\x07", 0)
        assert window.memory[0] == 7, "what nobody wrote to is the file"
        assert window.memory[page] == 1
        window.give_up(page, 3 * page)
        assert window.written() == [(6 * page, 7 * page)]
        assert window.memory[page] == 0
    assert path.read_bytes()[6 * page] == 0, "a write to the window is the window's alone"


def test_the_probe_survives_kernels_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> int:
        raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr(private_window, "_page_flags", missing)
    assert not writes_show.__wrapped__()
