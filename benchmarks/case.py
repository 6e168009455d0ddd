"""What a measurement trains; plain values, so that pages can be made from it without torch."""

from __future__ import annotations

from dataclasses import dataclass

MODES = (
    "plain",
    "keep",
    "blocks",
    "hsdp",
    "columns",
    "accumulate",
    "quantized",
    "offload-optimizer",
    "offload-params",
    "tensor-parallel",
)
"""Freed after forward; kept until backward; kept by blocks of half the ranks; two replicas;
matrices sharded on dim 1; two micro-batches, the first without communication; int8 weights and
gradients; optimizer state on the host; parameters, gradients and state on the host; layers divided
over two ranks. See modes.py for what each means to polyshard and to torch."""

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

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one step."""
        return 2 if self.mode == "accumulate" else 1
