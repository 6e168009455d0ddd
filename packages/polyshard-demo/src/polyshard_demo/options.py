"""Every option of ``polyshard train``: its type, its words, and its panel in ``--help``."""

from pathlib import Path
from typing import Annotated

import typer

from polyshard_demo.settings import DeviceName, EngineName, PresetName

DATA, MODEL = "Text and batches", "Model and engine"
TRAINING, OUTPUT = "Training", "Output and resuming"

Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file, or a directory of *.txt, *.md, *.rst. "
        "Default: the documentation that ships with Python.",
        rich_help_panel=DATA,
    ),
]
Batch = Annotated[
    int, typer.Option(help="Sequences per step over all ranks.", rich_help_panel=DATA)
]
Sequence = Annotated[int, typer.Option(help="Bytes per sequence.", rich_help_panel=DATA)]
Accumulate = Annotated[
    int,
    typer.Option(help="Micro-batches each rank splits its share into.", rich_help_panel=DATA),
]
Preset = Annotated[PresetName, typer.Option(help="Size of the model.", rich_help_panel=MODEL)]
Tied = Annotated[
    bool, typer.Option("--tied", help="Share embedding and head.", rich_help_panel=MODEL)
]
Dropout = Annotated[
    float,
    typer.Option(
        help="Share of what attention and feed-forward add that is left out in training.",
        rich_help_panel=MODEL,
    ),
]
Engine = Annotated[
    EngineName, typer.Option(help="Library that shards the model.", rich_help_panel=MODEL)
]
Plugins = Annotated[
    str, typer.Option(help="polyshard plugins: name[,name...].", rich_help_panel=MODEL)
]
Quantize = Annotated[
    str,
    typer.Option(
        help="Quantize communication with polyshard-quantized: one of its formats, such as "
        "int8, or PARAMETERS,GRADIENTS, each a format or native.",
        rich_help_panel=MODEL,
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="What rests away from the device: optimizer=disk,params=host; tiers are device, "
        "host and disk. Also fraction=0.5 and path=DIRECTORY.",
        rich_help_panel=MODEL,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Local processes; ignored under torchrun. Default: 2, or 1 for engine single.",
        rich_help_panel=MODEL,
    ),
]
Tp = Annotated[
    int,
    typer.Option(
        help="Ranks that share each layer, with polyshard-tensor-parallel.",
        rich_help_panel=MODEL,
    ),
]
ShardRanks = Annotated[
    int,
    typer.Option(
        help="Neighbouring ranks that hold one copy of the model between them; others hold "
        "further copies (HSDP). Under torchrun, the ranks of a host. 0: all hold one.",
        rich_help_panel=MODEL,
    ),
]
Timeout = Annotated[
    int,
    typer.Option(
        help="Seconds after which a transfer that does not end is an error. 0: torch's default.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[DeviceName, typer.Option(help="Where to compute.", rich_help_panel=MODEL)]
Bf16 = Annotated[
    bool,
    typer.Option(
        "--bf16", help="Gather and compute in bf16, reduce in fp32.", rich_help_panel=MODEL
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.", rich_help_panel=TRAINING)]
Lr = Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=TRAINING)]
Seed = Annotated[
    int, typer.Option(help="Decides initial weights and batches.", rich_help_panel=TRAINING)
]
Guards = Annotated[
    bool,
    typer.Option(
        "--guards",
        help="End the run where gradients are not finite, or memory changed by itself.",
        rich_help_panel=TRAINING,
    ),
]
Reproducible = Annotated[
    int,
    typer.Option(
        metavar="SLOTS",
        help="The same bits on 1, 2, 4, ... ranks, up to SLOTS, with polyshard-reproducible: a "
        "step is SLOTS micro-batches, whoever runs them. 0: ranks decide.",
        rich_help_panel=TRAINING,
    ),
]
EvalEvery = Annotated[
    int,
    typer.Option(help="Steps between evaluations; 0: only at the end.", rich_help_panel=TRAINING),
]
LogEvery = Annotated[
    int,
    typer.Option(
        help="Steps between lines when the output is not a terminal.", rich_help_panel=OUTPUT
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Run directory. Default: runs/DATE-TIME, or the run that is resumed.",
        rich_help_panel=OUTPUT,
    ),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(help="Steps between checkpoints; 0: only the last.", rich_help_panel=OUTPUT),
]
Record = Annotated[
    Path | None,
    typer.Option(
        help="Folder for digests of every step, which `polyshard bisect` compares with another "
        "run's; needs --reproducible.",
        rich_help_panel=OUTPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Folder for what each rank does when, with polyshard-trace: every step, a file per "
        "rank and one of all, for Perfetto and `polyshard trace`.",
        rich_help_panel=OUTPUT,
    ),
]
Page = Annotated[
    bool,
    typer.Option(
        "--page/--no-page",
        help="Write report.html in the end, with polyshard-plan: what happened beside what was "
        "predicted.",
        rich_help_panel=OUTPUT,
    ),
]
Machine = Annotated[
    str,
    typer.Option(
        help="What that page predicts time for: a file that `polyshard plan --measure` wrote here, "
        "or h100x8 and its like. Default: it predicts memory and bytes alone.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        help="Run directory, or one of its checkpoints, to go on from; "
        "also with other ranks or another engine. auto: go on in --out, or start there.",
        rich_help_panel=OUTPUT,
    ),
]
