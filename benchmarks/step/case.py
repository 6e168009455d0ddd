"""What a measurement trains; plain values, so that pages can be made from it without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

MODES = (
    "plain",  # weights are freed after forward
    "keep",  # weights are kept until backward
    "blocks",  # weights are kept by blocks of half the ranks
    "hsdp",  # two replicas
    "columns",  # matrices are sharded on dim 1
    "accumulate",  # two micro-batches, the first without communication
    "quantized",  # weights and gradients travel as int8
    "offload-optimizer",  # optimizer state rests on the host
    "offload-params",  # parameters, gradients and optimizer state rest on the host
    "tensor-parallel",  # layers are divided over two ranks
)
"""What each is to polyshard and to torch stands in modes.py."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """A Llama-style model and how it is trained.

    Attributes:
        width: Elements a position; heads of 64, feed-forward of 2.75 times as many.
        layers: Blocks, each a unit of its own.
        tokens: Bytes of text in one rank's batch of one sequence.
        ranks: Processes on this machine.
        dtype: Of compute. Parameters and reductions are float32.
        mode: One of :data:`MODES`.
        steps: Timed, after ``warmup`` more.
        warmup: Steps before the first that counts.
    """

    width: int = 1024
    layers: int = 8
    tokens: int = 16
    ranks: int = 2
    dtype: str = "float32"
    mode: str = "plain"
    steps: int = 15
    warmup: int = 3

    def __post_init__(self) -> None:
        """Refuse what no engine can run.

        Raises:
            ValueError: a field that is out of its range.
        """
        if self.mode not in MODES:
            raise ValueError(f"mode '{self.mode}' is none of {', '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype '{self.dtype}' is none of {', '.join(DTYPES)}")
        if self.mode in ("hsdp", "tensor-parallel", "blocks") and (
            self.ranks < 4 or self.ranks % 2
        ):
            raise ValueError(f"mode '{self.mode}' divides an even number of 4 or more ranks")
        if min(self.width, self.layers, self.tokens, self.ranks, self.steps) < 1 or self.warmup < 0:
            raise ValueError("sizes and steps are at least 1, warmup at least 0")

    def quick(self) -> Self:
        """The same code in seconds; figures of it mean nothing."""
        width, layers = min(self.width, 128), min(self.layers, 2)
        return replace(self, width=width, layers=layers, steps=3, warmup=1)

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one step."""
        return 2 if self.mode == "accumulate" else 1
