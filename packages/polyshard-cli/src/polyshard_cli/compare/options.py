"""Every option of ``polyshard compare``: its type, its words, and its panel in ``--help``."""

from pathlib import Path
from typing import Annotated

import typer

from polyshard_cli.compare.settings import DeviceName

WHAT, HOW, OUTPUT = "Job and engines", "Measurement", "Output"

Job = Annotated[
    str,
    typer.Argument(
        help="A Python file with build(), package.module:function, or demo (demo:tiny, "
        "demo:medium).",
        metavar="[JOB]",
    ),
]
Engines = Annotated[
    str,
    typer.Option(
        help="polyshard, fsdp2, fsdp1, ddp, single, with options: "
        "polyshard+int8+offload-optimizer,fsdp2+bf16. The others are compared with the first.",
        rich_help_panel=WHAT,
    ),
]
Ranks = Annotated[
    int, typer.Option(help="Processes of each engine, on this machine.", rich_help_panel=WHAT)
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        help="Modules to shard one by one, by pattern: 'layers.*'. Repeat. Default: the job's, or "
        "members of module lists.",
        rich_help_panel=WHAT,
    ),
]
Batch = Annotated[
    int,
    typer.Option(help="Of the demonstration: sequences a rank and step.", rich_help_panel=WHAT),
]
Sequence = Annotated[
    int, typer.Option(help="Of the demonstration: bytes a sequence.", rich_help_panel=WHAT)
]
Steps = Annotated[int, typer.Option(help="Steps that are timed.", rich_help_panel=HOW)]
Warmup = Annotated[int, typer.Option(help="Steps before these.", rich_help_panel=HOW)]
Seed = Annotated[int, typer.Option(help="Of weights and batches.", rich_help_panel=HOW)]
Device = Annotated[
    DeviceName, typer.Option(help="auto is CUDA where there is one.", rich_help_panel=HOW)
]
Timeout = Annotated[
    int,
    typer.Option(
        help="Seconds after which an engine that does not answer has failed.", rich_help_panel=HOW
    ),
]
Sequential = Annotated[
    bool,
    typer.Option(
        "--sequential",
        help="One engine after the other, where memory holds only one. Else they take turns.",
        rich_help_panel=HOW,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write a JSON object to FILE; - prints it.", rich_help_panel=OUTPUT
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(help="Draw FILE.png (or .svg, .pdf). Needs matplotlib.", rich_help_panel=OUTPUT),
]
