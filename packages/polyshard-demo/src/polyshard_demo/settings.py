"""Every option of a training run, in one frozen dataclass that is plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from polyshard_demo.errors import DemoError
from polyshard_demo.plugins import check_slots, check_tp

__all__ = ["DeviceName", "EngineName", "PresetName", "Settings"]

EngineName = Literal["polyshard", "torch", "single"]
PresetName = Literal["tiny", "small", "medium"]
DeviceName = Literal["auto", "cpu", "cuda"]


LEAST = {
    **dict.fromkeys(("ranks", "tp", "steps", "batch", "sequence", "accumulate"), 1),
    **dict.fromkeys(("eval_batches", "log_every"), 1),
    **dict.fromkeys(("checkpoint_every", "eval_every", "seed", "shard_ranks"), 0),
    **dict.fromkeys(("timeout", "reproducible"), 0),
}
FIXED = ("preset", "tied", "dropout", "batch", "sequence", "seed", "reproducible")
"""What a resumed run keeps: its model and its data."""


def _option(panel: str, words: str, *names: str, **more: Any) -> Any:
    """What `polyshard train --help` says of a field."""
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


_data = partial(_option, "Text and batches")
_model = partial(_option, "Model and engine")
_training = partial(_option, "Training")
_output = partial(_option, "Output and resuming")

TEXT = (
    "A text file, or a directory of *.txt, *.md, *.rst. Default: the documentation that ships with "
    "Python."
)
QUANTIZE = (
    "Quantize communication with polyshard-quantized: one of its formats, such as int8, or "
    "PARAMETERS,GRADIENTS, each a format or native."
)
OFFLOAD = (
    "Offload with polyshard-offload, such as optimizer=disk,params=host; tiers are device, host "
    "and disk. Also fraction=0.5 and path=DIRECTORY."
)
RANKS = "Local processes; ignored under torchrun. Default: 2, or 1 for engine single."
TP = "Ranks that share each layer, with polyshard-tensor-parallel."
SHARD_RANKS = (
    "Shard each copy of the model over this many neighbouring ranks (HSDP), under torchrun the "
    "ranks of a host. 0: one copy over all ranks."
)
GUARDS = "End the run when gradients are not finite or memory is corrupted."
REPRODUCIBLE = (
    "Train to the same bits on 1, 2, 4, ... ranks, up to SLOTS, with polyshard-reproducible: a "
    "step has SLOTS micro-batches. 0: off."
)
OUT = "Run directory. Default: runs/DATE-TIME, or the run that is resumed."
RECORD = "Folder for digests of every step, for `polyshard bisect`; needs --reproducible."
TRACE = (
    "Folder for timelines of every step, a file per rank and one of all, for Perfetto and "
    "`polyshard trace`."
)
PAGE = "Write report.html at the end: measured and predicted figures."
MACHINE = (
    "Machine for which that page predicts time: a file that `polyshard plan --measure` wrote, or a "
    "name such as h100x8. Default: predict memory and bytes only."
)
RESUME = (
    "Run directory, or one of its checkpoints, to continue, also with another number of ranks or "
    "engine. auto: continue in --out, or start there."
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Validated on construction; equal settings mean equal losses.

    A field with the words of an option is one of `polyshard train`. Of the others, ``weight_decay``
    is AdamW's, of matrices alone, ``clip`` is the largest global gradient norm, ``eval_batches``
    the batches of held-out text per evaluation, and ``auto`` whether to start anew where ``resume``
    has no checkpoint yet.
    """

    text: Annotated[Path | None, _data(TEXT)] = None
    batch: Annotated[int, _data("Sequences per step over all ranks.")] = 8
    sequence: Annotated[int, _data("Bytes per sequence.")] = 128
    accumulate: Annotated[int, _data("Micro-batches each rank splits its share into.")] = 1
    preset: Annotated[PresetName, _model("Size of the model.")] = "small"
    tied: Annotated[bool, _model("Share embedding and head.", "--tied")] = False
    dropout: Annotated[float, _model("Dropout after attention and feed-forward.")] = 0.0
    engine: Annotated[EngineName, _model("Library that shards the model.")] = "polyshard"
    plugins: Annotated[tuple[str, ...], _model("polyshard plugins: name[,name...].")] = ()
    quantize: Annotated[str, _model(QUANTIZE)] = ""
    offload: Annotated[str, _model(OFFLOAD)] = ""
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
    auto: bool = False

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_engine()
        check_tp(self.ranks, self.tp)
        self._check_shards()
        if self.reproducible:
            self._check_reproducible()
        else:
            self._check_batch()

    def _check_ranges(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise DemoError(f"--{option} must be at least {least}, got {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise DemoError(f"--{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise DemoError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        for name, kind in (("engine", EngineName), ("preset", PresetName), ("device", DeviceName)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise DemoError(f"--{name} must be one of {known}; got {getattr(self, name)!r}")

    def _check_engine(self) -> None:
        for name in ("plugins", "quantize", "offload", "trace", "reproducible", "tp"):
            if self.engine != "polyshard" and getattr(self, name) != getattr(Settings, name):
                raise DemoError(f"--{name} needs --engine polyshard, got --engine {self.engine}")
        if self.record is not None and not self.reproducible:
            raise DemoError(
                f"--record {self.record} needs --reproducible: other runs differ from each other "
                "anyway"
            )
        if self.engine == "single" and self.ranks > 1:
            raise DemoError(f"--engine single does not shard; use --ranks 1, not {self.ranks}")
        if self.engine == "single" and self.bf16:
            raise DemoError("--bf16 is a policy of the sharding engines; --engine single has none")

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

    def _check_shards(self) -> None:
        if self.shard_ranks and self.engine == "single":
            raise DemoError("--shard-ranks needs an engine that shards, got --engine single")
        if self.shard_ranks and self.data_ranks % self.shard_ranks:
            raise DemoError(
                f"--shard-ranks {self.shard_ranks} does not divide {self.data_ranks} data-parallel "
                "ranks; every copy of the model needs that many"
            )

    def _check_batch(self) -> None:
        parts = self.data_ranks * self.accumulate
        if self.batch % parts:
            kind = "ranks" if self.tp == 1 else "data-parallel ranks"
            raise DemoError(
                f"--batch {self.batch} does not divide over {self.data_ranks} {kind} x "
                f"{self.accumulate} micro-batches; use a multiple of {parts}"
            )

    def _check_reproducible(self) -> None:
        if self.quantize:
            raise DemoError(
                f"--reproducible with --quantize {self.quantize}: quantized blocks end where "
                "shards do, so that results depend on the number of ranks; leave one of them out"
            )
        check_slots(self.reproducible, self.data_ranks, self.batch)
        turns = self.reproducible // self.data_ranks
        if self.accumulate not in (1, turns):
            raise DemoError(
                f"--accumulate {self.accumulate}: with --reproducible {self.reproducible} each of "
                f"{self.data_ranks} ranks runs {turns} micro-batches; leave the option out"
            )

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON-ready data (paths become strings, tuples become lists)."""
        plain = asdict(self) | {"plugins": list(self.plugins)}
        return {k: str(value) if isinstance(value, Path) else value for k, value in plain.items()}

    def check_continues(self, saved: Mapping[str, Any], source: Path) -> None:
        """Refuse to go on from a run whose model or data differ from these settings.

        Ranks, engine, precision, micro-batches, learning rate and length may change.
        """
        # What an older version did not write it did not have: then it is as if left out.
        before = {name: saved.get(name, getattr(Settings, name)) for name in FIXED}
        wrong = [
            f"--{name}: saved {value!r}, now {getattr(self, name)!r}"
            for name, value in before.items()
            if value != getattr(self, name)
        ]
        if wrong:
            raise DemoError(
                f"cannot resume from {source}, it was written with other settings:\n  "
                + "\n  ".join(wrong)
                + "\npass the saved values, or start a new run without --resume"
            )
