"""Whether quantizing pays here: measures the link and the codec, then does the arithmetic.

    python -m benchmarks.quantized.breakeven [--mib 16]              (two ranks on loopback)
    torchrun ... -m benchmarks.quantized.breakeven --joined          (on the ranks given)

For every world size and format it compares the time of an all-gather of ``mib`` of fp32 without
overlap: moving the bytes, against encoding, moving fewer bytes, and decoding. Above 1.00 quantizing
is faster. The link is taken to be every rank's own. Needs polyshard-quantized.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.harness import Work, run_ranks, seconds, table
from benchmarks.quantized.codec import FORMATS, codec_of

WORLDS = (2, 4, 8, 16, 64)
MARGIN = 1.1
"""Less than a tenth is within what repeated runs differ by."""


@dataclass(frozen=True)
class Measured:
    """Seconds per byte: of the link, of casting fp32 to bf16 and back, and of each codec."""

    link: float
    cast: float
    encode: tuple[float, ...]
    decode: tuple[float, ...]


def link_seconds_per_byte(mib: int) -> float:
    """Both directions at once between ranks 0 and 1, point to point, as the engine sends."""
    rank = dist.get_rank()
    mine = torch.zeros(mib << 20, dtype=torch.uint8)
    theirs = torch.empty_like(mine)
    samples = []
    for _ in range(6):
        dist.barrier()
        begin = time.perf_counter()
        if rank < 2:
            works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
            for work in works:
                assert work is not None
                work.wait()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:]) / mine.nbytes


def measure(mib: int) -> Measured:
    """On every rank at once, as in a step; rank 0's answer counts."""
    link = link_seconds_per_byte(mib)
    values = torch.randn(mib * (1 << 20) // 4 // 4096, 4096)
    half = values.bfloat16()
    cast = _median(lambda: (half.copy_(values), values.copy_(half))) / values.nbytes
    pairs = [codec_of(form, values) for form in FORMATS]
    encode = tuple(_median(e) / values.nbytes for e, _ in pairs)
    decode = tuple(_median(d) / values.nbytes for _, d in pairs)
    return Measured(link, cast, encode, decode)


def _median(work: Work) -> float:
    dist.barrier()
    return statistics.median([seconds(work) for _ in range(6)][1:])


def gains(found: Measured, world_size: int, number: int) -> tuple[float, float]:
    """How much faster than fp32 and than bf16 an all-gather is with format ``number``."""
    form = FORMATS[number]
    share = (form.code_bytes(form.block_elements) + 4) / form.block_elements / 4
    moved = (world_size - 1) / world_size
    quantized = (
        found.encode[number] / world_size + moved * share * found.link + found.decode[number]
    )
    return moved * found.link / quantized, (moved * 0.5 * found.link + found.cast) / quantized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--joined", action="store_true", help="use the ranks of torchrun")
    options = parser.parse_args()
    if options.joined:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = measure(options.mib)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return
    else:
        found = run_ranks(2, measure, options.mib)
    print(f"link {8e-9 / found.link:.2f} Gbit/s each way; {options.mib} MiB of fp32, one thread")
    for form, encode, decode in zip(FORMATS, found.encode, found.decode, strict=True):
        print(f"{form}: encodes {1e-9 / encode:.1f} GB/s, decodes {1e-9 / decode:.1f} GB/s")
    heads = ["ranks", *(f"{form} vs {dtype}" for form in FORMATS for dtype in ("fp32", "bf16"))]
    rows = (
        [str(ranks), *(_says(gain) for n in range(len(FORMATS)) for gain in gains(found, ranks, n))]
        for ranks in WORLDS
    )
    print("", *table(heads, rows), sep="\n")


def _says(gain: float) -> str:
    if 1 / MARGIN < gain < MARGIN:
        return f"{gain:.2f}x even"
    return f"{gain:.2f}x {'yes' if gain > 1 else 'no'}"


if __name__ == "__main__":
    main()
