"""The Triton kernels give the bits of the tensor operations: interpreted, and on CUDA natively."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from polyshard_quantized import BlockFormat, Float8Block, Int4Block, Int8Block, round_trip
from polyshard_quantized.arithmetic.accelerator import LARGEST_BLOCK, kernels_for

FORMATS = (
    "int8",
    "int8 of 100",
    "int8 of 1",
    "int8 of 6000",
    "e4m3",
    "e4m3 of 33",
    "int4",
    "int4 of 9",
    "int4 of 1",
)
CASES = [f"{check} {name}" for check in ("encode", "decode") for name in FORMATS]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton: CUDA builds of torch bring it, elsewhere pip install triton (1 GB)",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each case of ``kernel_cases.py`` found; empty texts for those that passed."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kernel_cases.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return cast("dict[str, str]", json.loads(done.stdout))


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_the_same_bits(outcomes: dict[str, str], case: str) -> None:
    """Every layout and dtype; subnormal, infinite and undefined values, ties, tails, nothing."""
    assert not outcomes[case]


@needs_triton
def test_every_case_is_looked_at(outcomes: dict[str, str]) -> None:
    assert sorted(outcomes) == sorted(CASES)


def test_tensor_operations_serve_a_cpu_without_triton() -> None:
    """Nothing imports Triton before CUDA asks for it; torch itself may."""
    program = (
        "import sys, torch; sys.modules['triton'] = None;"
        "from polyshard_quantized import Int8Block, round_trip;"
        "round_trip(torch.randn(4, 64), Int8Block());"
        "print('polyshard_quantized.arithmetic.kernels' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
    assert kernels_for(torch.empty(1, 8)) is None


class OnCuda:
    """What :func:`kernels_for` looks at, of a tensor on a device that is not there."""

    is_cuda = True

    def __init__(self, size: int) -> None:
        self.shape = torch.Size((1, size))


@needs_triton
def test_kernels_serve_cuda_but_for_huge_blocks() -> None:
    chosen: Any = kernels_for(cast("Any", OnCuda(256)))
    assert chosen.__name__ == "polyshard_quantized.arithmetic.kernels"
    assert kernels_for(cast("Any", OnCuda(LARGEST_BLOCK + 1))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [Int8Block(), Float8Block(), Int4Block()], ids=str)
def test_values_on_an_accelerator_are_those_of_a_cpu(form: BlockFormat, dtype: torch.dtype) -> None:
    """Through whatever serves there: kernels on CUDA, else the same tensor operations."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    for shape in ((300, 1000), (3, 77), (0, 64)):
        values = torch.randn(shape).to(dtype)
        if values.shape[0] > 2:
            values[0, 3], values[1, 5], values[2] = torch.inf, torch.nan, 0.0
        found, expected = round_trip(values.to(device), form).cpu(), round_trip(values, form)
        finite = expected.isfinite()
        assert torch.equal(found.isfinite(), finite)
        assert torch.equal(found[finite], expected[finite])
