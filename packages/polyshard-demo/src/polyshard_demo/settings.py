"""Every option of a training run, in one frozen dataclass that is plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from polyshard_demo.errors import DemoError
from polyshard_demo.quantize import check_quantize
from polyshard_demo.reproducible import check_slots
from polyshard_demo.tensor_parallel import check_tp
from polyshard_demo.tracing import check_trace

__all__ = ["DeviceName", "EngineName", "PresetName", "Settings"]

EngineName = Literal["polyshard", "torch", "single"]
PresetName = Literal["tiny", "small", "medium"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Validated on construction; equal settings mean equal losses.

    Attributes:
        out: Directory for checkpoints, ``report.json`` and ``loss.png``.
        text: A text file, or a directory of ``*.txt``, ``*.md`` and ``*.rst`` files. None means
            the documentation that ships with Python.
        engine: Which library shards the model.
        plugins: Names of polyshard plugins, in the order given.
        quantize: What travels between ranks, for the plugin ``polyshard-quantized``: one format for
            parameters and gradients, or two with a comma, each a name that the plugin knows, such
            as ``int8``, or ``native``. Empty: nothing is quantized.
        offload: What rests away from the device, as ``optimizer=disk,params=host``; needs the
            plugin polyshard-offload.
        ranks: Number of processes; each holds ``1 / ranks`` of the model.
        tp: How many neighbouring ranks share each layer (tensor parallelism); needs the plugin
            polyshard-tensor-parallel. The others are data-parallel.
        shard_ranks: How many neighbouring data-parallel ranks hold one copy of the model between
            them; others hold further copies (HSDP). 0: all of them hold one.
        preset: Size of the model.
        tied: Whether the output head shares the embedding's weight.
        dropout: Share of what attention and feed-forward add that is left out in training; below 1.
        steps: Optimizer steps of the whole run, including those before a resume.
        batch: Sequences per optimizer step, over all ranks and micro-batches.
        sequence: Bytes per sequence.
        accumulate: Micro-batches per optimizer step on each rank.
        lr: Peak learning rate; warms up over the first twentieth of the steps, then a cosine
            down to a tenth of the peak.
        weight_decay: AdamW's decay of matrices; vectors are not decayed.
        clip: Largest global gradient norm.
        seed: Decides the initial weights and every batch.
        guards: Whether a step with gradients that are not finite, and memory that changed while
            nobody wrote it, end the run.
        reproducible: Micro-batches of a step over all ranks, a power of two: weights, optimizer
            state and losses are the same bits at every number of ranks that divides it. Needs the
            plugin polyshard-reproducible. 0: each rank has ``accumulate`` of them.
        bf16: Gather and compute in bfloat16, reduce gradients in float32.
        device: ``auto`` is CUDA where there is one.
        timeout: Seconds after which a transfer that does not end is an error; 0 is torch's default.
        resume: A run directory or one of its checkpoints to go on from.
        auto: Whether to start anew where ``resume`` has no checkpoint yet.
        checkpoint_every: Steps between checkpoints; 0 writes only the last.
        eval_every: Steps between evaluations; 0 evaluates only at the end.
        eval_batches: Batches of held-out text per evaluation.
        log_every: Steps between progress lines when the output is not a terminal.
        record: Folder for digests of every step, for ``polyshard bisect``.
        trace: Folder for what each rank does when, for Perfetto and ``polyshard trace``; needs the
            package polyshard-trace.
        page: Whether ``report.html`` is written in the end; needs the package polyshard-plan.
        machine: What the page predicts time for, as ``polyshard plan --machine`` takes it. Empty:
            time is not predicted.
    """

    out: Path
    text: Path | None = None
    engine: EngineName = "polyshard"
    plugins: tuple[str, ...] = ()
    quantize: str = ""
    offload: str = ""
    ranks: int = 2
    tp: int = 1
    shard_ranks: int = 0
    preset: PresetName = "small"
    tied: bool = False
    dropout: float = 0.0
    steps: int = 300
    batch: int = 8
    sequence: int = 128
    accumulate: int = 1
    lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    guards: bool = False
    reproducible: int = 0
    bf16: bool = False
    device: DeviceName = "auto"
    timeout: int = 0
    resume: Path | None = None
    auto: bool = False
    checkpoint_every: int = 100
    eval_every: int = 50
    eval_batches: int = 8
    log_every: int = 10
    record: Path | None = None
    trace: Path | None = None
    page: bool = True
    machine: str = ""

    def __post_init__(self) -> None:
        for name in ("ranks", "tp", "steps", "batch", "sequence", "accumulate", "eval_batches"):
            _check_at_least(name, getattr(self, name), 1)
        for name in (
            "checkpoint_every",
            "eval_every",
            "seed",
            "shard_ranks",
            "timeout",
            "reproducible",
        ):
            _check_at_least(name, getattr(self, name), 0)
        _check_at_least("log_every", self.log_every, 1)
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise DemoError(f"--{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise DemoError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        _check_choice("engine", self.engine, get_args(EngineName))
        _check_choice("preset", self.preset, get_args(PresetName))
        _check_choice("device", self.device, get_args(DeviceName))
        check_tp(self.ranks, self.tp, self.engine)
        self._check_shards()
        if self.reproducible:
            self._check_reproducible()
        else:
            self._check_batch()
        self._check_engine()

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
        if self.engine != "polyshard":
            raise DemoError(f"--reproducible needs --engine polyshard, got --engine {self.engine}")
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

    def _check_engine(self) -> None:
        if self.plugins and self.engine != "polyshard":
            raise DemoError(f"--plugins needs --engine polyshard, got --engine {self.engine}")
        if self.quantize:
            check_quantize(self.quantize)
            if self.engine != "polyshard":
                raise DemoError(f"--quantize needs --engine polyshard, got --engine {self.engine}")
        if self.offload and self.engine != "polyshard":
            raise DemoError(f"--offload needs --engine polyshard, got --engine {self.engine}")
        if self.record is not None and not self.reproducible:
            raise DemoError(
                f"--record {self.record} needs --reproducible: other runs differ from each other "
                "anyway"
            )
        if self.trace is not None:
            check_trace(self.trace, self.engine)
        if self.engine == "single" and self.ranks > 1:
            raise DemoError(f"--engine single does not shard; use --ranks 1, not {self.ranks}")
        if self.engine == "single" and self.bf16:
            raise DemoError("--bf16 is a policy of the sharding engines; --engine single has none")

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON-ready data (paths become strings, tuples become lists)."""
        plain = asdict(self)
        paths = {name: value for name, value in plain.items() if isinstance(value, Path)}
        return (
            plain
            | {name: str(value) for name, value in paths.items()}
            | {"plugins": list(self.plugins)}
        )

    def check_continues(self, saved: Mapping[str, Any], source: Path) -> None:
        """Refuse to go on from a run whose model or data differ from these settings.

        Ranks, engine, precision, micro-batches, learning rate and length may change.
        """
        fixed = ("preset", "tied", "dropout", "batch", "sequence", "seed", "reproducible")
        now = {field.name: getattr(self, field.name) for field in fields(self)}
        # What an older version did not write it did not have: then it is as if left out.
        before = {name: saved.get(name, getattr(Settings, name)) for name in fixed}
        wrong = [
            f"--{name}: saved {before[name]!r}, now {now[name]!r}"
            for name in now
            if name in fixed and before[name] != now[name]
        ]
        if wrong:
            raise DemoError(
                f"cannot resume from {source}, it was written with other settings:\n  "
                + "\n  ".join(wrong)
                + "\npass the saved values, or start a new run without --resume"
            )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DemoError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DemoError(f"--{name} must be one of {', '.join(choices)}; got {value!r}")
