"""Whether quantizing pays here: measures the link and the codec, then does the arithmetic.

    python -m benchmarks quantized.breakeven [--mib 16]              (two ranks on loopback)
    torchrun ... -m benchmarks.quantized.breakeven                   (on the ranks given)

For every world size and format it compares the time of an all-gather of ``mib`` of fp32 without
overlap: moving the bytes, against encoding, moving fewer bytes, and decoding. Above 1.00 quantizing
is faster. The link is taken to be every rank's own. Needs polyshard-quantized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import MIB, Found, Work, run_ranks, seconds
from benchmarks.quantized.codec import FORMATS, codec_of
from polyshard_quantized import BlockFormat

WORLDS = (2, 4, 8, 16, 64)
MARGIN = 1.1
"""Less than a tenth is within what repeated runs differ by."""
Seconds = dict[str, float]
"""A byte: of the link, of casting fp32 to bf16 and back, and of each codec's two ways."""


@dataclass(frozen=True)
class Case(harness.Case, mib=1):
    """Of fp32."""

    mib: int = 16

    def measure(self) -> Found:
        """The link, the codecs, and what an all-gather gains by ranks."""
        found = run_ranks(2, times, self.mib) if "RANK" not in os.environ else _joined(self.mib)
        return {
            "link, Gbit/s each way": 8e-9 / found["link"],
            "codecs, GB/s": {name: 1e-9 / each for name, each in found.items() if name != "link"},
            **{f"{ranks} ranks": dict(_told(found, ranks)) for ranks in WORLDS},
        }


def times(mib: int) -> Seconds:
    """On every rank at once, as in a step; rank 0's answer counts."""
    values = torch.randn(mib * MIB // 4 // 4096, 4096)
    half = values.bfloat16()
    mine, theirs = (torch.zeros(values.nbytes, dtype=torch.uint8) for _ in range(2))
    works: dict[str, Work] = {
        "link": lambda: _exchange(mine, theirs),
        "cast": lambda: (half.copy_(values), values.copy_(half)),
    }
    for form in FORMATS:
        works[f"{form} encode"], works[f"{form} decode"] = codec_of(form, values)
    found = {}
    for name, work in works.items():
        dist.barrier()
        found[name] = median([seconds(work) for _ in range(6)][1:]) / values.nbytes
    return found


def _exchange(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both directions at once between ranks 0 and 1, point to point, as the engine sends."""
    rank = dist.get_rank()
    if rank < 2:
        for work in (dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)):
            assert work is not None
            work.wait()


def gains(found: Seconds, world_size: int, form: BlockFormat) -> tuple[float, float]:
    """How much faster than fp32 and than bf16 an all-gather is with ``form``."""
    share = (form.code_bytes(form.block_elements) + 4) / form.block_elements / 4
    moved = (world_size - 1) / world_size * found["link"]
    encode, decode = found[f"{form} encode"], found[f"{form} decode"]
    quantized = encode / world_size + share * moved + decode
    return moved / quantized, (0.5 * moved + found["cast"]) / quantized


def _joined(mib: int) -> Seconds:
    """On torchrun's ranks, of which the first one continues."""
    dist.init_process_group("gloo")
    found, rank = times(mib), dist.get_rank()
    dist.destroy_process_group()
    if rank:
        raise SystemExit
    return found


def _told(found: Seconds, ranks: int) -> Iterator[tuple[str, str]]:
    for form in FORMATS:
        for dtype, gain in zip(("fp32", "bf16"), gains(found, ranks, form), strict=True):
            verdict = "even" if 1 / MARGIN < gain < MARGIN else "yes" if gain > 1 else "no"
            yield f"{form} vs {dtype}", f"{gain:.2f}x {verdict}"
