"""Every option of ``polyshard plan``: its type, its words, and its panel in ``--help``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from polyshard_cli.plan.request.settings import Backend, OptimizerName


def _said(panel: str, words: str, *names: str) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel)


SHAPE, ENGINE, OUTPUT = "Model and mesh", "Engine and plugins", "Machine and output"
TUNING = "Search"

MODEL = (
    "package.module:factory, a directory with a transformers config.json, the name of a config "
    "class such as LlamaConfig, or demo (demo:tiny, demo:medium)."
)
MESH = "Axes with sizes: dp=8, replicate=2,dp=4, dp=512,tp=8."
BATCH = "Sequences per step over all data-parallel ranks. 0: one for each."
ACCUMULATE = "Micro-batches of a step; gradients are reduced in the last one."
SEQUENCE = "Tokens per sequence. 0: the model's own."
FIELDS = "A field of the config: num_hidden_layers=4. Repeat."
UNITS = "Modules to shard one by one: 'layers.*'. Repeat. Default: members of module lists."
INPUTS = "module:function of (batch, sequence) that makes the model's inputs. Default: tokens."
PLUGINS = "Installed plugins, or module:object: a,b,..."
QUANTIZE = "Formats of polyshard-quantized for parameters and gradients: int8, or int8,native."
OFFLOAD = "Tiers of polyshard-offload: optimizer=host,params=host. Also fraction=0.5."
PLACEMENT = "module:function of a parameter that returns its Shard, as shard_placement_fn does."
TP_PLAN = "module:function that returns a tensor-parallel plan, where none is ready-made."
RESHARD = "reshard_after_forward: auto, yes, no, or a number of ranks."
MACHINE = "h100x8, h200x8, a100x8, or a file that --measure wrote."
MEASURE = "Measure this machine for some seconds, write it to FILE.json, and plan for it."
HTML = "Write the plan to FILE, one page that needs no network, too."
TUNE = (
    "Search for the fastest setting that fits: meshes of as many ranks, units, resharding, tiers. "
    "Settings of other options stay."
)
BUDGET = "Memory of a device: 70GiB. Default: the machine's."
KEEP = "Settings that --tune keeps: mesh, replicate, tp, units, reshard, quantize, offload. Repeat."
LOSSY = "Let --tune try codecs, which change the values that are sent."

Model = Annotated[str, typer.Argument(help=MODEL)]
Mesh = Annotated[str, _said(SHAPE, MESH)]
Batch = Annotated[int, _said(SHAPE, BATCH)]
Accumulate = Annotated[int, _said(SHAPE, ACCUMULATE)]
Sequence = Annotated[int, _said(SHAPE, SEQUENCE)]
Fields = Annotated[list[str] | None, _said(SHAPE, FIELDS, "--set")]
Units = Annotated[list[str] | None, _said(SHAPE, UNITS)]
Inputs = Annotated[str, _said(SHAPE, INPUTS)]
Plugins = Annotated[str, _said(ENGINE, PLUGINS)]
Quantize = Annotated[str, _said(ENGINE, QUANTIZE)]
Offload = Annotated[str, _said(ENGINE, OFFLOAD)]
Placement = Annotated[str, _said(ENGINE, PLACEMENT)]
TpPlan = Annotated[str, _said(ENGINE, TP_PLAN)]
Bf16 = Annotated[bool, _said(ENGINE, "Gather and compute in bf16, reduce in fp32.", "--bf16")]
Reshard = Annotated[str, _said(ENGINE, RESHARD)]
Optimizer = Annotated[OptimizerName, _said(ENGINE, "Whose state is counted.")]
Rank = Annotated[int, _said(ENGINE, "Whose bytes and memory; ranks may differ.")]
Machine = Annotated[str, _said(OUTPUT, MACHINE)]
BackendOption = Annotated[
    Backend | None, _said(OUTPUT, "gloo or nccl. Default: the machine's.", "--backend")
]
Measure = Annotated[Path | None, _said(OUTPUT, MEASURE, "--measure")]
Parameters = Annotated[bool, _said(OUTPUT, "Every parameter, by dim and axis.", "--parameters")]
Json = Annotated[bool, _said(OUTPUT, "The plan as JSON.", "--json")]
Html = Annotated[Path | None, _said(OUTPUT, HTML, "--html")]
Tune = Annotated[bool, _said(TUNING, TUNE, "--tune")]
MemoryBudget = Annotated[str, _said(TUNING, BUDGET)]
Keep = Annotated[list[str] | None, _said(TUNING, KEEP)]
AllowLossy = Annotated[bool, _said(TUNING, LOSSY, "--allow-lossy")]
