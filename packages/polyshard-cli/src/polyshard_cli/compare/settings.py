"""What a comparison is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from polyshard_cli.compare.errors import CompareError

__all__ = ["DEFAULT_ENGINES", "DeviceName", "Settings"]

DeviceName = Literal["auto", "cpu", "cuda"]
DEFAULT_ENGINES = ("polyshard", "fsdp2", "ddp", "single")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every choice of a comparison. Equal settings mean equal weights, batches and losses.

    Attributes:
        job: ``demo``, ``demo:PRESET``, a Python file, or ``package.module:function``.
        engines: names as :func:`polyshard_cli.compare.engines.spec.parse` reads them; the others
            are compared with the first.
        ranks: processes of each engine, all on this machine; ``single`` has one.
        steps: optimizer steps that are timed, after ``warmup`` more.
        warmup: steps before the first that is timed; their losses count.
        seed: decides what ``torch``, ``random`` and NumPy draw in the job.
        device: where ranks compute; ``auto`` is CUDA where there is one.
        units: patterns of module names that become units; none: those of the job.
        batch: sequences a step on each rank, of the demonstration.
        sequence: bytes a sequence, of the demonstration.
        timeout: seconds after which an engine that does not answer has failed.
        sequential: one engine after the other, for models of which only one fits in memory; else
            they take turns, step by step.

    Raises:
        CompareError: for numbers out of range.
    """

    job: str = "demo"
    engines: tuple[str, ...] = DEFAULT_ENGINES
    ranks: int = 2
    steps: int = 20
    warmup: int = 3
    seed: int = 0
    device: DeviceName = "auto"
    units: tuple[str, ...] = ()
    batch: int = 4
    sequence: int = 128
    timeout: int = 300
    sequential: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        for name in ("ranks", "steps", "batch", "sequence", "timeout"):
            if getattr(self, name) < 1:
                raise CompareError(f"--{name} {getattr(self, name)}: give at least 1")
        if self.warmup < 0:
            raise CompareError(f"--warmup {self.warmup}: give 0 or more")
        if not self.engines:
            raise CompareError(f"--engines is empty; try {','.join(DEFAULT_ENGINES)}")
        if self.device not in get_args(DeviceName):
            raise CompareError(f"--device {self.device}: one of {', '.join(get_args(DeviceName))}")

    @property
    def all_steps(self) -> int:
        """Warm-up included."""
        return self.warmup + self.steps
