"""What a plan is asked for: every choice declared once, for Python and for the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import typer

from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.mesh import MeshSpec, parse_mesh

Backend = Literal["gloo", "nccl"]
OptimizerName = Literal["adamw", "sgd", "momentum"]

SHAPE, ENGINE = "Model and mesh", "Engine and plugins"
OUTPUT, SEARCH = "Machine and output", "Search"
"""Panels of ``--help``."""


UNITS_OF_SIZE = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(text: str, option: str) -> int:
    """Bytes that ``text`` says, such as ``70GiB`` (binary), ``80GB`` (decimal) or ``1000000``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", text.strip())
    nbytes = round(float(found[1]) * UNITS_OF_SIZE[found[2] or ""]) if found else 0
    if nbytes < 1:
        raise PlanError(f"{option} {text}: write a size such as 70GiB, 512MiB or 80GB")
    return nbytes


@dataclass(frozen=True)
class Written:
    """What the command takes for a setting of another type: a type, its default, how it is read."""

    type: Any
    default: Any
    read: Callable[[Any], Any]


def said(panel: str, words: str, *names: str) -> Any:
    """An option of the command; without ``names`` it is called as what it sets."""
    return typer.Option(*names, help=words, rich_help_panel=panel)


def setting(
    default: Any, panel: str, words: str, *names: str, written: Written | None = None
) -> Any:
    """A field of :class:`Settings` and its option."""
    return field(default=default, metadata={"option": said(panel, words, *names), "as": written})


def _fields(given: Sequence[str] | None) -> Mapping[str, object]:
    """``field=value``, where the value is JSON or a plain word."""
    found: dict[str, object] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise PlanError(f"--set {text}: write field=value, as num_hidden_layers=4")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _reshard(text: str) -> bool | int | None:
    words: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
    if text in words:
        return words[text]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise PlanError(f"--reshard {text}: write auto, yes, no, or a number of ranks such as 8")


LIST = list[str] | None
MODEL = (
    "package.module:factory, a directory with a transformers config.json, the name of a config "
    "class such as LlamaConfig, or demo (demo:tiny, demo:medium)."
)
OVERRIDES = {
    "option": said(SHAPE, "A field of the config: num_hidden_layers=4. Repeat.", "--set"),
    "as": Written(LIST, None, _fields),
}
UNITS = "Modules to shard one by one: 'layers.*'. Repeat. Default: members of module lists."
INPUTS = "module:function of (batch, sequence) that makes the model's inputs. Default: tokens."
PLUGINS = "Installed plugins, or module:object: a,b,..."
QUANTIZE = "Formats of polyshard-quantized for parameters and gradients: int8, or int8,native."
OFFLOAD = "Tiers of polyshard-offload: optimizer=host,params=host. Also fraction=0.5."
TP_PLAN = "module:function that returns a tensor-parallel plan, where none is ready-made."
PLACEMENT = "module:function of a parameter that returns its Shard, as shard_placement_fn does."
RESHARD = "reshard_after_forward: auto, yes, no, or a number of ranks."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every choice of a plan.

    The words of each are those of ``polyshard plan --help``. An empty text, and ``None``, stand for
    what is chosen without one.
    """

    model: str = field(default="demo", metadata={"option": typer.Argument(help=MODEL)})
    mesh: MeshSpec = setting(
        parse_mesh("dp=8"),
        SHAPE,
        "Axes with sizes: dp=8, replicate=2,dp=4, dp=512,tp=8.",
        written=Written(str, "dp=8", parse_mesh),
    )
    batch: int = setting(
        0, SHAPE, "Sequences per step over all data-parallel ranks. 0: one for each."
    )
    accumulate: int = setting(
        1, SHAPE, "Micro-batches of a step; gradients are reduced in the last one."
    )
    """As with ``set_requires_gradient_sync(False)`` before the others."""
    sequence: int = setting(0, SHAPE, "Tokens per sequence. 0: the model's own.")
    """At most 4096, if it is not set."""
    overrides: Mapping[str, object] = field(default_factory=dict, metadata=OVERRIDES)
    units: tuple[str, ...] = setting(
        (), SHAPE, UNITS, written=Written(LIST, None, lambda given: tuple(given or ()))
    )
    inputs: str = setting("", SHAPE, INPUTS)
    plugins: tuple[str, ...] = setting((), ENGINE, PLUGINS, written=Written(str, "", _names))
    quantize: str = setting("", ENGINE, QUANTIZE)
    offload: str = setting("", ENGINE, OFFLOAD)
    tp_plan: str = setting("", ENGINE, TP_PLAN)
    bf16: bool = setting(False, ENGINE, "Gather and compute in bf16, reduce in fp32.", "--bf16")
    reshard: bool | int | None = setting(
        None, ENGINE, RESHARD, written=Written(str, "auto", _reshard)
    )
    """``None``: units are freed between forward and backward, the root is not."""
    placement: str = setting("", ENGINE, PLACEMENT)
    optimizer: OptimizerName = setting("adamw", ENGINE, "Whose state is counted.")
    rank: int = setting(0, ENGINE, "Whose bytes and memory; ranks may differ.")
    machine: str = setting(
        "h100x8", OUTPUT, "h100x8, h200x8, a100x8, or a file that --measure wrote."
    )
    backend: Backend | None = setting(
        None, OUTPUT, "gloo or nccl. Default: the machine's.", "--backend"
    )

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit the mesh."""
        if self.accumulate < 1:
            raise PlanError(f"--accumulate {self.accumulate}: a step has at least 1 micro-batch")
        parts = self.mesh.data_ranks * self.accumulate
        if self.batch < 0 or self.sequence < 0:
            raise PlanError("--batch and --sequence must not be negative; leave them out or give 1")
        if self.batch % parts:
            near = max(parts, round(self.batch / parts) * parts)
            raise PlanError(
                f"--batch {self.batch} does not divide over {self._words}; --batch {near} would do"
            )
        if not 0 <= self.rank < self.mesh.ranks:
            raise PlanError(
                f"--rank {self.rank}: ranks of this mesh are 0 to {self.mesh.ranks - 1}"
            )

    @property
    def local_batch(self) -> int:
        """Sequences of a micro-batch on each rank."""
        return max(1, self.batch // (self.mesh.data_ranks * self.accumulate))

    @property
    def _words(self) -> str:
        """What a batch divides over."""
        times = f" x {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return f"{self.mesh.data_ranks} data-parallel ranks{times}"
