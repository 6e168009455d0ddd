"""Tensors by address see what lies there, and keep nothing alive."""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from polyshard._torch.private import storage_holders
from polyshard.memory.addressed import tensor_at


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn],
)
def test_it_is_the_memory_at_the_address(dtype: torch.dtype) -> None:
    base = torch.arange(12.0).to(dtype)
    found = tensor_at(base[4:].data_ptr(), 5, base)
    assert (found.shape, found.dtype, found.device) == ((5,), dtype, base.device)
    assert found.data_ptr() == base.data_ptr() + 4 * dtype.itemsize
    found.copy_(torch.full((5,), 3.0).to(dtype))
    expected = [0, 1, 2, 3, 3, 3, 3, 3, 3, 9, 10, 11]
    assert torch.equal(base.to(torch.complex64).real, torch.tensor(expected, dtype=torch.float32))


def test_two_storages_as_one() -> None:
    """What it is for: tensors that lie end to end in storages of their own."""
    base = torch.zeros(8)
    first, second = (torch.from_numpy(base.numpy()[i : i + 4]) for i in (0, 4))
    whole = tensor_at(first.data_ptr(), 8, first)
    whole += 1
    assert first.tolist() == second.tolist() == [1.0] * 4


def test_it_holds_nothing() -> None:
    base = torch.zeros(8)
    found = tensor_at(base.data_ptr(), 8, base)
    assert storage_holders(base) == 1
    part = found[2:]
    del found
    gc.collect()
    part += 1  # the description goes with the last tensor
    assert base.tolist() == [0.0, 0.0, *[1.0] * 6]


def test_descriptions_are_freed() -> None:
    base = torch.zeros(8)
    for _ in range(1000):
        tensor_at(base.data_ptr(), 8, base)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200_000):
        tensor_at(base.data_ptr(), 8, base)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device() -> None:
    base = torch.zeros(8, device="cuda")
    tensor_at(base[2:].data_ptr(), 4, base).add_(1)
    assert base.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
