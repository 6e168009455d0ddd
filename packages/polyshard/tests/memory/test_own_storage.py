"""Aliases that own a storage with their bytes alone, on memory that they share."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polyshard._torch.private import storage_holders
from polyshard.memory.own_storage import own_storage, own_storage_of_gradient


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64],
)
def test_an_alias_has_a_storage_of_its_own(dtype: torch.dtype) -> None:
    base = torch.zeros(12).to(dtype)
    alone = own_storage(base[4:10].view(2, 3))
    assert (alone.storage_offset(), alone.untyped_storage().nbytes()) == (0, alone.nbytes)
    assert (alone.shape, alone.stride(), alone.dtype) == ((2, 3), (3, 1), dtype)
    before = alone._version
    base.copy_(torch.ones(12).to(dtype))
    assert alone.data_ptr() == base.data_ptr() + 4 * dtype.itemsize
    assert bool((alone.float() == 1.0).all() if not dtype.is_complex else alone.real.bool().all())
    assert alone._version == before, "a counter of its own"


@pytest.mark.parametrize("make", [own_storage, own_storage_of_gradient])
def test_shapes_keep_their_strides(make: Callable[[Tensor], Tensor]) -> None:
    base = torch.arange(24.0)
    for part in (base[5], base[2:2].view(0, 3), base[4:8].view(1, 4), base[4:8].view(4, 1)):
        alone = make(part)
        assert (alone.shape, alone.stride(), alone.storage_offset()) == (
            part.shape,
            part.stride(),
            0,
        )
        assert torch.equal(alone, part)
        assert alone.untyped_storage().nbytes() == part.numel() * 4


def test_an_alias_without_values_has_none() -> None:
    alone = own_storage(torch.empty(8, device="meta")[2:6])
    assert alone.is_meta
    assert alone.shape == (4,)


def test_memory_lives_as_long_as_any_alias() -> None:
    base = torch.arange(1 << 20, dtype=torch.float32)
    first, second = own_storage(base[:7]), own_storage(base[7:9])
    assert storage_holders(base) == 3
    del first
    gc.collect()
    assert storage_holders(base) == 2
    del base
    gc.collect()
    torch.zeros(1 << 20)  # would land in freed memory
    assert second.tolist() == [7.0, 8.0]


def test_an_alias_outlives_the_interpreter_quietly() -> None:
    program = (
        "import torch; from polyshard.memory.own_storage import own_storage\n"
        "torch.kept = own_storage(torch.ones(9)[3:])\n"
        "cycle = [own_storage(torch.ones(9)[3:])]; cycle.append(cycle)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
