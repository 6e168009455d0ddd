"""Every option of a training run, in one frozen dataclass that is plain data."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from polyshard_cli.plan.request.settings import OFFLOAD, PLUGINS, QUANTIZE
from polyshard_demo.errors import DemoError

__all__ = ["AUTO", "DeviceName", "EngineName", "PresetName", "Settings"]

EngineName = Literal["polyshard", "torch", "single"]
PresetName = Literal["tiny", "small", "medium"]
DeviceName = Literal["auto", "cpu", "cuda"]

AUTO = Path("auto")
"""``resume`` of a run that continues in ``out``, or starts there."""
SOME = ("ranks", "tp", "steps", "batch", "sequence", "accumulate", "eval_batches", "log_every")
"""At least 1."""
SOME_OR_NONE = ("checkpoint_every", "eval_every", "seed", "shard_ranks", "timeout", "reproducible")
POLYSHARD = ("plugins", "quantize", "offload", "trace", "reproducible", "tp")
"""Options that other engines do not have."""


def _option(panel: str, words: str, *names: str, **more: Any) -> Any:
    """What `polyshard train --help` says of a field."""
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


_data = partial(_option, "Text and batches")
_model = partial(_option, "Model and engine")
_training = partial(_option, "Training")
_output = partial(_option, "Output and resuming")

TEXT = "A file, or a directory of *.txt, *.md, *.rst. Default: Python's own documentation."
RANKS = "Local processes; ignored under torchrun. Default: 2, or 1 for engine single."
TP = "Ranks that share each layer, with polyshard-tensor-parallel."
SHARD_RANKS = "A copy of the model for each so many neighbouring ranks (HSDP). 0: one for all."
GUARDS = "End the run when gradients are not finite or memory is corrupted."
REPRODUCIBLE = "The same bits on 1, 2, 4, ... SLOTS ranks, with polyshard-reproducible. 0: off."
OUT = "Run directory. Default: runs/DATE-TIME, or the run that is resumed."
RECORD = "Folder for digests of every step, for `polyshard bisect`; needs --reproducible."
TRACE = "Folder for timelines of all ranks, for Perfetto and `polyshard trace`."
PAGE = "Write report.html at the end: measured and predicted figures."
MACHINE = "Predict time on it, too: a file of `polyshard plan --measure`, or a name such as h100x8."
RESUME = "Run directory or checkpoint to continue. auto: continue in --out, or start there."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Validated on construction; equal settings mean equal losses.

    A field with the words of an option is one of `polyshard train`. Of the others, ``weight_decay``
    is AdamW's, of matrices alone, ``clip`` is the largest global gradient norm, ``eval_batches``
    the batches of held-out text per evaluation.
    """

    text: Annotated[Path | None, _data(TEXT)] = None
    batch: Annotated[int, _data("Sequences per step over all ranks.")] = 8
    sequence: Annotated[int, _data("Bytes per sequence.")] = 128
    accumulate: Annotated[int, _data("Micro-batches each rank splits its share into.")] = 1
    preset: Annotated[PresetName, _model("Size of the model.")] = "small"
    tied: Annotated[bool, _model("Share embedding and head.", "--tied")] = False
    dropout: Annotated[float, _model("Dropout after attention and feed-forward.")] = 0.0
    engine: Annotated[EngineName, _model("Library that shards the model.")] = "polyshard"
    plugins: Annotated[str, _model(PLUGINS)] = ""
    quantize: Annotated[str, _model(QUANTIZE)] = ""
    offload: Annotated[str, _model(f"{OFFLOAD} Also path=DIRECTORY, for disk.")] = ""
    ranks: Annotated[int, _model(RANKS)] = 2
    tp: Annotated[int, _model(TP)] = 1
    shard_ranks: Annotated[int, _model(SHARD_RANKS)] = 0
    device: Annotated[DeviceName, _model("Where to compute.")] = "auto"
    timeout: Annotated[int, _model("Seconds until a transfer times out. 0: torch's default.")] = 0
    bf16: Annotated[bool, _model("Gather and compute in bf16, reduce in fp32.", "--bf16")] = False
    steps: Annotated[int, _training("Optimizer steps.")] = 300
    lr: Annotated[float, _training("Peak learning rate.")] = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: Annotated[int, _training("Seed of initial weights and batches.")] = 0
    guards: Annotated[bool, _training(GUARDS, "--guards")] = False
    reproducible: Annotated[int, _training(REPRODUCIBLE, metavar="SLOTS")] = 0
    eval_every: Annotated[int, _training("Steps between evaluations; 0: only at the end.")] = 50
    eval_batches: int = 8
    out: Annotated[Path, _output(OUT)]
    checkpoint_every: Annotated[int, _output("Steps between checkpoints; 0: only the last.")] = 100
    log_every: Annotated[int, _output("Steps between lines.")] = 10
    record: Annotated[Path | None, _output(RECORD)] = None
    trace: Annotated[Path | None, _output(TRACE)] = None
    page: Annotated[bool, _output(PAGE, "--page/--no-page")] = True
    machine: Annotated[str, _output(MACHINE)] = ""
    resume: Annotated[Path | None, _output(RESUME)] = None

    def __post_init__(self) -> None:
        """Refuse the first thing that does not fit."""
        if wrong := next(self._wrong(), ""):
            raise DemoError(wrong)

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own."""
        return self.ranks // self.tp

    @property
    def data_mesh(self) -> tuple[int, ...]:
        """Shape of the data-parallel ranks: ``(shards,)``, or ``(replicas, shards)`` (HSDP)."""
        if not self.shard_ranks:
            return (self.data_ranks,)
        return (self.data_ranks // self.shard_ranks, self.shard_ranks)

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Those of ``plugins``."""
        return tuple(name.strip() for name in self.plugins.split(",") if name.strip())

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON-ready data; paths become strings."""
        plain = asdict(self).items()
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain}

    def _wrong(self) -> Iterator[str]:
        """What does not fit, a message each; later ones need what earlier ones look at."""
        yield from self._wrong_numbers()
        for name, kind in (("engine", EngineName), ("preset", PresetName), ("device", DeviceName)):
            if (value := getattr(self, name)) not in (known := get_args(kind)):
                yield f"--{name} must be one of {', '.join(known)}; got {value!r}"
        yield from self._wrong_engine()
        if self.ranks % self.tp:
            yield f"--tp {self.tp} does not divide --ranks {self.ranks}; try --ranks {2 * self.tp}"
        if self.shard_ranks and self.data_ranks % self.shard_ranks:
            yield (
                f"--shard-ranks {self.shard_ranks} does not divide {self.data_ranks} data-parallel "
                "ranks; every copy of the model needs that many"
            )
        yield from self._wrong_slots() if self.reproducible else self._wrong_batch()

    def _wrong_numbers(self) -> Iterator[str]:
        for name in (*SOME, *SOME_OR_NONE):
            if (value := getattr(self, name)) < (least := int(name in SOME)):
                yield f"--{name.replace('_', '-')} must be at least {least}, got {value}"
        for name in ("lr", "clip"):
            if not (value := getattr(self, name)) > 0:
                yield f"--{name} must be above 0, got {value}"
        if not 0 <= self.dropout < 1:
            yield f"--dropout must be at least 0 and below 1, got {self.dropout}"

    def _wrong_engine(self) -> Iterator[str]:
        for name in POLYSHARD if self.engine != "polyshard" else ():
            if getattr(self, name) != getattr(Settings, name):
                yield f"--{name} needs --engine polyshard, got --engine {self.engine}"
        if self.record is not None and not self.reproducible:
            yield f"--record {self.record} needs --reproducible: other runs differ anyway"
        if self.engine != "single":
            return
        if self.ranks > 1:
            yield f"--engine single does not shard; use --ranks 1, not {self.ranks}"
        if self.bf16:
            yield "--bf16 is a policy of the sharding engines; --engine single has none"
        if self.shard_ranks:
            yield "--shard-ranks needs an engine that shards, got --engine single"

    def _wrong_batch(self) -> Iterator[str]:
        parts = self.data_ranks * self.accumulate
        if self.batch % parts:
            kind = "ranks" if self.tp == 1 else "data-parallel ranks"
            yield (
                f"--batch {self.batch} does not divide over {self.data_ranks} {kind} x "
                f"{self.accumulate} micro-batches; use a multiple of {parts}"
            )

    def _wrong_slots(self) -> Iterator[str]:
        slots, ranks = self.reproducible, self.data_ranks
        if self.quantize:
            yield (
                f"--reproducible with --quantize {self.quantize}: polyshard-reproducible "
                "excludes codecs, since only unchanged gradients are summed in its tree; leave one "
                "of them out"
            )
        if slots % ranks:
            yield (
                f"--reproducible {slots}: {ranks} data-parallel ranks do not divide {slots} slots; "
                "use 1, 2, 4, 8, ... ranks, at most as many as slots"
            )
        if self.batch % slots:
            yield f"--batch {self.batch} does not divide over {slots} slots; use a multiple of it"
        if self.accumulate not in (1, slots // ranks):
            yield (
                f"--accumulate {self.accumulate}: with --reproducible {slots} each of {ranks} "
                f"ranks runs {slots // ranks} micro-batches; leave the option out"
            )
