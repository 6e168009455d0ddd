"""A case of the benchmark of step time: a model and how a measurement of steps trains it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from benchmarks.harness import OnRanks

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
"""engines.py has what each is to polyshard and to torch."""
ON_FOUR = ("hsdp", "tensor-parallel", "blocks")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case(OnRanks):
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
        memory: Whether peaks are measured too, in runs of their own.
    """

    width: int = 1024
    layers: int = 8
    tokens: int = 16
    dtype: str = "float32"
    mode: str = "plain"
    steps: int = 15
    warmup: int = 3
    memory: bool = False

    def __post_init__(self) -> None:
        """Refuse what no engine can run.

        Raises:
            ValueError: a field that is out of its range.
        """
        for name, known in (("mode", MODES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} '{getattr(self, name)}' is none of {', '.join(known)}")
        if self.mode in ON_FOUR and (self.ranks < 4 or self.ranks % 2):
            raise ValueError(f"mode '{self.mode}' divides an even number of 4 or more ranks")
        if min(self.width, self.layers, self.tokens, self.ranks, self.steps) < 1 or self.warmup < 0:
            raise ValueError("sizes and steps are at least 1, warmup at least 0")

    def quick(self) -> Self:
        """The same code in seconds; figures of it mean nothing."""
        width, layers = min(self.width, 128), min(self.layers, 2)
        return replace(self, width=width, layers=layers, steps=3, warmup=1, memory=False)

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one step."""
        return 2 if self.mode == "accumulate" else 1
