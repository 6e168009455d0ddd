"""Memory, host access, generators, counters, and what one is told when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import polyshard_sim
from polyshard_sim import building
from polyshard_sim.testing import run, sim

MIB = 1 << 20


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: one that crashes, or enables the device otherwise."""
    setup = "import torch, polyshard_sim as ps\nps.enable('lowest')\n"
    command = [sys.executable, "-c", setup + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def memory(rank: int, size: int) -> None:
    sim().empty_cache()
    base = sim().memory_allocated()
    a = torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    b = torch.empty(5 * MIB, dtype=torch.uint8, device="sim")
    assert sim().memory_allocated() - base == 8 * MIB
    assert sim().memory_reserved() % (20 * MIB) == 0, "one segment of CUDA's size is split"
    places = a.data_ptr(), b.data_ptr()
    assert places[1] - places[0] == 3 * MIB
    del a, b
    c = torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
    assert c.data_ptr() == places[0], "neighbours are merged"
    side = sim().Stream()
    with sim().stream(side):
        assert torch.empty(1 * MIB, dtype=torch.uint8, device="sim").data_ptr() != places[0]
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on device 0"):
        torch.empty(200 * MIB, dtype=torch.uint8, device="sim")
    assert sim().max_memory_allocated() < 100 * MIB
    assert torch.empty(8, device="sim").isnan().all().item(), "new memory is poisoned"
    x = torch.ones(4, device="sim")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory has been freed"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(4, device="sim") + torch.ones(4)


def lazily_conjugated(rank: int, size: int) -> None:
    x = torch.complex(torch.arange(3.0), -torch.arange(3.0))
    for there, here in zip(*([t.conj(), t.conj().imag] for t in (x.to("sim"), x)), strict=True):
        assert there.is_conj() is here.is_conj()
        assert there.is_neg() is here.is_neg()
        assert torch.equal(there.clone().cpu(), here)
        assert torch.equal(there.cpu(), here)
    weight = x.to("sim").requires_grad_()
    torch.view_as_real(weight * weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), 2 * x.conj() * (1 + 1j))


def same_memory(rank: int, size: int) -> None:
    x = torch.ones(4, device="sim")
    assert x.detach().is_set_to(x.view(4))
    assert not x[1:].is_set_to(x[:3])
    assert not x.clone().is_set_to(x)


def counted(rank: int, size: int) -> None:
    x = torch.ones(256, device="sim")
    sim().synchronize()
    polyshard_sim.reset_counters()
    x.add_(1)
    x.cpu()
    sim().synchronize()
    counts = polyshard_sim.counters()
    assert (counts.launches, counts.copies_to_host, counts.bytes_to_host) == (2, 1, 1024)
    assert counts.host_waits == 2


def writes(rank: int, size: int) -> None:
    """Autograd counts writes to tensors, those of lists of tensors as well."""
    seen = []
    for device in ("cpu", "sim"):
        value = torch.ones(3, device=device)
        value.zero_()
        torch._foreach_add_([value], 1.0)
        torch._foreach_mul_([value], [value])
        seen.append(value._version)
    assert seen == [3, 3]


def generators(rank: int, size: int) -> None:
    sim().manual_seed(5)
    torch.randn(7, device="sim")
    state = sim().get_rng_state()
    assert state.numel() == 16
    first = torch.rand(100, device="sim").cpu()
    sim().set_rng_state(state)
    assert torch.equal(first, torch.rand(100, device="sim").cpu())
    own = torch.Generator(device="sim").manual_seed(9)
    expected = torch.rand(5, generator=torch.Generator().manual_seed(9))
    assert torch.equal(expected, torch.rand(5, device="sim", generator=own).cpu())


def writes_of_the_host(rank: int, size: int) -> None:
    """CUDA refuses what would have to wait; the kernel wrote a copy, or zeros into the tensor."""
    total, host = torch.ones((), device="cpu"), torch.zeros(5, device="cpu")
    for write in (
        lambda: total.add_(torch.ones((), device="sim")),
        lambda: total.mul_(torch.full((), 3.0, device="sim")),
        lambda: host.index_put_((torch.tensor([2], device="sim"),), torch.tensor(7.0)),
        lambda: torch.add(torch.ones((), device="sim"), 1, out=total),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            write()  # type: ignore[no-untyped-call]
    assert total.item() == 1
    assert host.tolist() == [0] * 5


def freed_while_queued(rank: int, size: int) -> None:
    """Pages go back to the system when kernels have run, as cudaFree waits for the device."""
    x = torch.ones(4 * MIB, device="sim")  # a segment of its own
    sim().synchronize()
    y = x + 1
    del x
    sim().empty_cache()
    assert y[[0, -1]].tolist() == [2, 2]
    x = torch.ones(10 * MIB, device="sim")
    sim().synchronize()
    y = x[:4] + 1
    del x
    with sim().stream(sim().Stream()):  # needs the memory of x, on another stream
        torch.full((18 * MIB,), 9.0, device="sim")
    assert y.tolist() == [2] * 4


def resized(rank: int, size: int) -> None:
    for device in ("cpu", "sim"):
        x = torch.arange(6.0, device=device).view(2, 3).t()
        assert x.resize_(3, 2).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert x.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
    x = torch.ones(4, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        x.resize_(200 * MIB)
    assert x.tolist() == [1] * 4


def quotients(rank: int, size: int) -> None:
    """What an operator returns may depend on the default dtype."""
    x = torch.arange(4, device="sim")
    before = torch.get_default_dtype()
    assert (x / 2).dtype is before
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is x.sqrt().dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


def failing_kernel(rank: int, size: int) -> None:
    torch.zeros(4, device="sim").index_select(0, torch.tensor([9], device="sim"))
    with pytest.raises(RuntimeError, match=r"launched earlier failed.*index_select"):
        sim().synchronize()
    sim().synchronize()


def all_in_one(rank: int, size: int) -> None:
    cases = memory, same_memory, lazily_conjugated, counted, writes, generators, failing_kernel
    for case in (*cases, writes_of_the_host, freed_while_queued, resized, quotients):
        case(rank, size)


@pytest.mark.parametrize("mode", ["threads", "highest"])
def test_device(mode: str) -> None:
    run(all_in_one, 1, mode=mode, capacity_bytes=100 * MIB)


def freed_early(rank: int, size: int) -> bool:
    """What CUDA permits by chance: memory read on another stream after it was freed.

    A collective holds the reader until the memory is freed, however slow the host is: the other
    rank joins later.
    """
    control, held = dist.new_group(backend="gloo"), torch.ones(1, device="sim")
    if rank > 0:
        dist.barrier(group=control)
        dist.all_reduce(held)
        return True
    side = sim().Stream()
    x = torch.ones(64, device="sim")
    side.wait_stream(sim().current_stream())
    del_me = x
    del x
    with sim().stream(side):
        dist.all_reduce(held)
        y = del_me * 2
    del del_me
    dist.barrier(group=control)
    sim().current_stream().wait_stream(side)
    return bool(y.cpu().eq(2).all().item())


def test_strict_poisons_freed_memory() -> None:
    assert run(freed_early, 2, mode="lowest") == [True, True]
    assert run(freed_early, 2, mode="lowest", strict=True) == [False, True]


def test_host_access_faults() -> None:
    done = python(
        "import ctypes, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "x = torch.ones(4, device='sim'); torch.sim.synchronize()\n"
        "ctypes.string_at(x.data_ptr(), 4)"
    )
    assert done.returncode == -11, done.stderr


def test_settings_are_fixed() -> None:
    done = python(
        "ps.enable('lowest')\ntry:\n  ps.enable('random')\nexcept ps.SimError as e:\n  print(e)"
    )
    assert "cannot change within a process" in done.stdout, done.stderr


@pytest.mark.parametrize("devices", [0, -1, 17])
def test_devices_that_there_cannot_be(devices: int) -> None:
    with pytest.raises(ValueError, match=f"devices must be between 1 and 16, not {devices}"):
        polyshard_sim.enable(devices=devices)
    with pytest.raises(ValueError, match="capacity_bytes must be positive, not 0"):
        polyshard_sim.enable(capacity_bytes=0)


def test_streams_of_devices_that_there_are_not() -> None:
    done = python("try:\n  torch.sim.default_stream(9)\nexcept RuntimeError as e:\n  print(e)")
    assert "there is no device 9" in done.stdout, done.stderr


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="threads, random, lowest, highest, not 'fast'"):
        polyshard_sim.enable("fast")  # type: ignore[arg-type]


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("POLYSHARD_SIM_CACHE", str(tmp_path))
    assert not polyshard_sim.is_buildable()
    with pytest.raises(polyshard_sim.SimError, match=r"Missing: a C\+\+20 compiler"):
        building.library()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(polyshard_sim.SimError, match=r"torch 2\.13 or newer \(this is 2\.12\.1\)"):
        building.library()
    assert not polyshard_sim.is_buildable()
