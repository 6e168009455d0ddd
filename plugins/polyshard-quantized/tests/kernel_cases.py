"""Compares the Triton kernels with tensor operations, bitwise; run as a program.

Triton's interpreter must be asked for before Triton is imported, hence a process of its own: on
CUDA the kernels run as they are, elsewhere ``TRITON_INTERPRET=1`` runs them on a CPU.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from polyshard_quantized import BlockFormat, Float8Block, Int4Block, Int8Block
from polyshard_quantized.arithmetic import kernels
from polyshard_quantized.arithmetic.accelerator import Kernels
from polyshard_quantized.arithmetic.codec import BlockCodec, Nearest
from polyshard_quantized.workspace import Workspace

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS: dict[str, tuple[BlockFormat, int]] = {
    "int8": (Int8Block(), 256),
    "int8 of 100": (Int8Block(), 100),
    "int8 of 1": (Int8Block(), 1),
    "int8 of 6000": (Int8Block(6000), 6000),
    "e4m3": (Float8Block(), 256),
    "e4m3 of 33": (Float8Block(), 33),
    "int4": (Int4Block(), 64),
    "int4 of 9": (Int4Block(9), 9),
    "int4 of 1": (Int4Block(9), 1),
}
LAYOUTS = ("blocks", "rows and columns", "payloads", "nothing")
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
KERNELS = cast("Kernels", kernels)

Arrays = tuple[Tensor, Tensor, Tensor]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Magnitudes from subnormal to infinite, zeros, NaN of several payloads, ties."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-44, 39, shape[:-1], generator=generator)[..., None]
    values = torch.randn(shape, generator=generator) * 10.0**exponents
    flat = values.view(-1, shape[-1])
    for row, special in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan)):
        if row < flat.shape[0]:
            flat[row, shape[-1] // 2] = special
    if flat.shape[0] > 8:
        flat[5] = 0.0
        flat[6] = torch.arange(shape[-1]) % 255 - 127.0  # codes of int8 themselves
        flat[7] = torch.arange(shape[-1]) % 15 / 2  # ties of int4
        flat[8].view(torch.int32)[0] = 0x7F800001  # a NaN whose last bits a scale drops
    return values.to(dtype)


def arrays(form: BlockFormat, size: int, layout: str, dtype: torch.dtype) -> Arrays:
    """Values, codes and scales as views apart from each other, as in a payload."""
    nbytes = form.code_bytes(size)
    shapes = {
        "blocks": (1, 40, 1),
        "rows and columns": (1, 7, 5),
        "payloads": (3, 4, 2),
        "nothing": (2, 0, 3),
    }
    payloads, rows, columns = shapes[layout]
    values = drawn((payloads, rows, columns, size), dtype)
    spaced = torch.zeros(payloads, rows * columns * size + 17, dtype=dtype)
    spaced[:, : rows * columns * size] = values.reshape(payloads, -1)
    row = columns * size
    held = spaced.to(DEVICE).as_strided(
        (payloads, rows, columns, size), (spaced.stride(0), row, size, 1)
    )
    codes = torch.zeros(payloads, rows, columns * nbytes + 3, dtype=torch.uint8, device=DEVICE)
    coded = codes.as_strided(
        (payloads, rows, columns, nbytes), (codes.stride(0), codes.stride(1), nbytes, 1)
    )
    scales = torch.zeros(payloads, rows, columns + 2, device=DEVICE)
    scaled = scales.as_strided(
        (payloads, rows, columns, 1), (scales.stride(0), scales.stride(1), 1, 1)
    )
    if layout == "blocks":
        return held[0, :, 0], coded[0, :, 0], scaled[0, :, 0]
    return (held[0], coded[0], scaled[0]) if payloads == 1 else (held, coded, scaled)


def copies(of: Arrays) -> Arrays:
    """The same values on the CPU, where tensor operations are the reference."""
    return tuple(t.cpu() for t in of)  # type: ignore[return-value]


def encodes_alike(form: BlockFormat, size: int, layout: str, dtype: torch.dtype) -> None:
    found = arrays(form, size, layout, dtype)
    values, codes, scales = copies(found)
    KERNELS.encode(form, *found)
    BlockCodec(form, Workspace(), Nearest()).encode(values, codes, scales)
    finite = scales.isfinite()
    assert torch.equal(found[2].cpu().isfinite(), finite), "not the same blocks are finite"
    assert torch.equal(found[2].cpu()[finite], scales[finite]), "scales differ"
    where = finite.expand_as(codes)
    different = int((found[1].cpu()[where] != codes[where]).sum())
    assert not different, f"{different} codes differ"


def decodes_alike(form: BlockFormat, size: int, layout: str, dtype: torch.dtype) -> None:
    found = arrays(form, size, layout, dtype)
    values, codes, scales = copies(found)
    codec = BlockCodec(form, Workspace(), Nearest())
    codec.encode(values, codes, scales)
    found[1].copy_(codes)
    found[2].copy_(scales)
    KERNELS.load(form, found[1], found[2], found[0])
    codec.decode(codes, scales, values)
    finite = values.isfinite()
    assert torch.equal(found[0].cpu().isfinite(), finite), "not the same values are finite"
    assert torch.equal(found[0].cpu()[finite], values[finite]), "values differ"


def nothing_else_is_written(form: BlockFormat, size: int, layout: str, dtype: torch.dtype) -> None:
    """Gaps between rows of codes and scales keep what they hold."""
    del layout
    _, codes, scales = arrays(form, size, "payloads", dtype)
    for array in (codes, scales):
        whole = torch.empty(0, dtype=array.dtype, device=DEVICE).set_(array.untyped_storage())
        whole.fill_(77)
    found = arrays(form, size, "payloads", dtype)[0]
    KERNELS.encode(form, found, codes, scales)
    for array, gap in ((codes, 3), (scales, 2)):
        row = array.as_strided(
            (*array.shape[:2], gap),
            (array.stride(0), array.stride(1), 1),
            array.shape[2] * array.shape[3],
        )
        assert bool((row == 77).all()), "wrote beside its blocks"


CHECKS: dict[str, Callable[[BlockFormat, int, str, torch.dtype], None]] = {
    "encode": encodes_alike,
    "decode": decodes_alike,
}


def main() -> None:
    """Print what each case found as JSON: an empty text for one that passed."""
    found = {}
    for check, name in itertools.product(CHECKS, FORMATS):
        form, size = FORMATS[name]
        problems = []
        for layout, dtype in itertools.product(LAYOUTS, DTYPES):
            try:
                CHECKS[check](form, size, layout, dtype)
            except AssertionError as error:
                problems.append(f"{layout}, {dtype}: {error}")
        found[f"{check} {name}"] = "; ".join(problems)
    for name, (form, size) in FORMATS.items():
        try:
            nothing_else_is_written(form, size, "payloads", torch.float32)
        except AssertionError as error:
            found[f"encode {name}"] += str(error)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
