"""A comparison that was never made, with numbers that are easy to add up."""

from __future__ import annotations

from polyshard_cli.compare import Comparison, Settings
from polyshard_cli.compare.ranks.messages import Failure
from polyshard_cli.compare.report.runs import Run
from polyshard_cli.compare.report.summary import summarize
from polyshard_cli.compare.training.memory import Memory
from polyshard_cli.compare.training.session import Facts, Sample

MIB = 1 << 20
LONG = "polyshard+int8+offload-optimizer+flat+some.package:plugin"


def run(name: str, seconds: list[float], losses: list[float], *, counted: int | None = None) -> Run:
    """Two ranks; the second takes half as long, and its loss is higher by 2."""
    steps = [
        [Sample((loss,), s, 100 + index, counted), Sample((loss + 2,), s / 2, 300, counted)]
        for index, (s, loss) in enumerate(zip(seconds, losses, strict=True))
    ]
    memory = [Memory(3 * MIB, MIB, False), Memory(5 * MIB, MIB, False)]
    return Run(name, Facts(1234567, 1000, 3, ()), steps, memory)


def settings(**given: object) -> Settings:
    chosen: dict[str, object] = {"engines": ("a",), "steps": 3, "warmup": 1, "device": "cpu"}
    return Settings(**(chosen | given))  # type: ignore[arg-type]


def found(**given: object) -> Comparison:
    broken = Run("fsdp1", failure=Failure(1, "ValueError: " + "so it is " * 30, "where"))
    runs = [
        run("polyshard", [9.0, 0.2, 0.1, 0.3], [5.0, 4.0, 3.0, 2.0], counted=90),
        run(LONG, [9.0, 0.1, 0.1, 0.1], [5.0, 4.0, 3.25, 2.0], counted=40),
        run("single", [9.0, 0.4, 0.5, 0.3], [5.0, 4.0, 3.0, 2.0]),
        broken,
    ]
    return summarize(settings(**given), runs)
