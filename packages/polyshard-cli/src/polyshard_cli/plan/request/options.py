"""Every option of ``polyshard plan``: its type, its words, and its panel in ``--help``."""

from pathlib import Path
from typing import Annotated

import typer

from polyshard_cli.plan.request.settings import Backend, OptimizerName

SHAPE, ENGINE, OUTPUT = "Model and mesh", "Engine and plugins", "Machine and output"
TUNING = "Search"

Model = Annotated[
    str,
    typer.Argument(
        help="package.module:factory, a directory with a transformers config.json, the name of a "
        "config class such as LlamaConfig, or demo (demo:tiny, demo:medium)."
    ),
]
Mesh = Annotated[
    str,
    typer.Option(
        help="Axes with sizes: dp=8, replicate=2,dp=4, dp=512,tp=8.", rich_help_panel=SHAPE
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        help="Sequences per step over all data-parallel ranks. 0: one for each.",
        rich_help_panel=SHAPE,
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        help="Micro-batches of a step; gradients are reduced in the last one.",
        rich_help_panel=SHAPE,
    ),
]
Sequence = Annotated[
    int, typer.Option(help="Tokens per sequence. 0: the model's own.", rich_help_panel=SHAPE)
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="A field of the config: num_hidden_layers=4. Repeat.", rich_help_panel=SHAPE
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        help="Modules to shard one by one, by pattern: 'layers.*'. Repeat. Default: members of "
        "module lists.",
        rich_help_panel=SHAPE,
    ),
]
Inputs = Annotated[
    str,
    typer.Option(
        help="module:function of (batch, sequence) that makes what the model is called with. "
        "Default: tokens.",
        rich_help_panel=SHAPE,
    ),
]
Plugins = Annotated[
    str,
    typer.Option(help="Installed plugins, or module:object: a,b,...", rich_help_panel=ENGINE),
]
Quantize = Annotated[
    str,
    typer.Option(
        help="Formats of polyshard-quantized for parameters and gradients: int8, or int8,native.",
        rich_help_panel=ENGINE,
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="Tiers of polyshard-offload: optimizer=host,params=host. Also fraction=0.5.",
        rich_help_panel=ENGINE,
    ),
]
Placement = Annotated[
    str,
    typer.Option(
        help="module:function of a parameter that returns its Shard, as shard_placement_fn does.",
        rich_help_panel=ENGINE,
    ),
]
TpPlan = Annotated[
    str,
    typer.Option(
        help="module:function that returns a tensor-parallel plan, where none is ready-made.",
        rich_help_panel=ENGINE,
    ),
]
Bf16 = Annotated[
    bool,
    typer.Option(
        "--bf16", help="Gather and compute in bf16, reduce in fp32.", rich_help_panel=ENGINE
    ),
]
Reshard = Annotated[
    str,
    typer.Option(
        help="reshard_after_forward: auto, yes, no, or a number of ranks.", rich_help_panel=ENGINE
    ),
]
Optimizer = Annotated[
    OptimizerName, typer.Option(help="Whose state is counted.", rich_help_panel=ENGINE)
]
Rank = Annotated[
    int, typer.Option(help="Whose bytes and memory; ranks may differ.", rich_help_panel=ENGINE)
]
Machine = Annotated[
    str,
    typer.Option(
        help="h100x8, h200x8, a100x8, or a file that --measure wrote.", rich_help_panel=OUTPUT
    ),
]
BackendOption = Annotated[
    Backend | None,
    typer.Option("--backend", help="gloo or nccl. Default: the machine's.", rich_help_panel=OUTPUT),
]
Measure = Annotated[
    Path | None,
    typer.Option(
        "--measure",
        help="Measure this machine for some seconds, write it to FILE.json, and plan for it.",
        rich_help_panel=OUTPUT,
    ),
]
Parameters = Annotated[
    bool,
    typer.Option("--parameters", help="Every parameter, by dim and axis.", rich_help_panel=OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="The plan as JSON.", rich_help_panel=OUTPUT)]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Write the plan to FILE, one page that needs no network, too.",
        rich_help_panel=OUTPUT,
    ),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="Search for the fastest setting that fits: meshes of as many ranks, units, "
        "resharding, tiers. What other options choose stays.",
        rich_help_panel=TUNING,
    ),
]
MemoryBudget = Annotated[
    str,
    typer.Option(
        help="What a device may hold: 70GiB. Default: what the machine's have.",
        rich_help_panel=TUNING,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="What --tune leaves as it is: mesh, replicate, tp, units, reshard, quantize, offload. "
        "Repeat.",
        rich_help_panel=TUNING,
    ),
]
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Have --tune try codecs, which change values that travel.",
        rich_help_panel=TUNING,
    ),
]
