"""What to look at before running a plan: each a fact with its number, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from polyshard.planning import readable
from polyshard_cli.plan.estimate.timing import Step, link_of
from polyshard_cli.plan.estimate.traffic import native_gather_bytes

TINY_ELEMENTS = 256
"""A shard of a matrix below this many elements is mostly the cost of moving it."""
MUCH_PADDING = 0.05
SHORT_SECONDS = 50e-6
"""A gather whose bytes take less than this, in seconds, is mostly latency."""
LARGE_PART = 0.4
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class Notice:
    """One line for a person, and a code for programs."""

    code: str
    message: str


def advice_for(step: Step) -> tuple[Notice, ...]:
    """All warnings, in a fixed order, each said once with how often it holds."""
    found = Counter(warning for check in CHECKS for warning in check(step))
    return tuple(
        one if count == 1 else replace(one, message=f"{one.message} [{count} times]")
        for one, count in found.items()
    )


def _not_run(step: Step) -> Iterator[Notice]:
    if step.found.problem:
        yield Notice(
            "no-activations",
            f"the model did not run on the meta device ({step.found.problem}), so activations and "
            "time count as nothing; give its inputs with --inputs module:function",
        )


def _too_large(step: Step) -> Iterator[Notice]:
    peak, size = step.memory.peak, step.machine.memory_bytes
    if size and peak.total > size:
        yield Notice(
            "memory",
            f"{readable(peak.total)} in {peak.name} do not fit into the {readable(size)} of a "
            f"device of {step.machine.name}; shard over more ranks, shorten --sequence, or "
            "offload",
        )


def _tiny_shards(step: Step) -> Iterator[Notice]:
    for group in step.groups:
        world = group.plan.layout.world_size
        matrices = [p for p in group.parameters if len(p.shape) > 1]
        tiny = [p for p in matrices if p.elements // world < TINY_ELEMENTS <= p.elements]
        if tiny:
            yield Notice(
                "tiny-shards",
                f"{len(tiny)} matrices of a unit leave fewer than {TINY_ELEMENTS} elements to a "
                f"rank, such as {pattern(tiny[0].name)} with {tiny[0].elements:,} over {world}; "
                "shard over fewer ranks and replicate (HSDP)",
            )


def _padding(step: Step) -> Iterator[Notice]:
    for group in step.groups:
        layout = group.plan.layout
        full = layout.shard_numel * layout.world_size
        waste = (full - group.plan.numel) / full if full else 0.0
        if waste > MUCH_PADDING:
            name = pattern(group.plan.name)
            yield Notice(
                "padding",
                f"{waste:.0%} of the shards of {name} are padding: sizes do not divide over "
                f"{layout.world_size} ranks; shard another dim, or over fewer ranks",
            )


def _codecs(step: Step) -> Iterator[Notice]:
    for group in step.groups:
        plan, name = group.plan, pattern(group.plan.name)
        native = native_gather_bytes(plan)
        if plan.roles.gather_codec == "native" or not native:
            continue
        if plan.payloads.gather is None or plan.gather_bytes >= native * 0.95:
            yield Notice(
                "codec-without-effect",
                f"{name}: {readable(plan.gather_bytes)} travel with the codec, and "
                f"{readable(native)} would without it; parameters are too small or excluded",
            )
            continue
        link = link_of(step.mesh.name("shard"), step.mesh, step.machine)
        saved = (native - plan.gather_bytes) / link.bytes_per_second
        # Encoding reads a shard, decoding writes every element once.
        work = (native + plan.unsharded_bytes) / step.machine.memory_bytes_per_second
        if work > saved:
            yield Notice(
                "codec-below-break-even",
                f"{name}: quantizing saves {saved * 1e3:.2f} ms on the wire and reads and writes "
                f"memory for {work * 1e3:.2f} ms; on this link native transfers are faster",
            )


def _group_sizes(step: Step) -> Iterator[Notice]:
    link = link_of(step.mesh.name("shard"), step.mesh, step.machine)
    total = sum(group.plan.unsharded_bytes for group in step.groups)
    units = [group for group in step.groups if not group.is_root]
    for group in units:
        seconds = group.plan.gather_bytes / link.bytes_per_second
        if group.plan.layout.world_size > 1 and seconds < SHORT_SECONDS:
            yield Notice(
                "small-unit",
                f"{pattern(group.plan.name)}: a gather of {readable(group.plan.gather_bytes)} "
                f"takes {seconds * 1e6:.1f} microseconds and is mostly latency; make larger units "
                "with --units",
            )
    for group in step.groups:
        if len(step.groups) > 1 and group.plan.unsharded_bytes > LARGE_PART * total:
            name = "the root" if group.is_root else pattern(group.plan.name)
            yield Notice(
                "large-unit",
                f"{name} holds {group.plan.unsharded_bytes / total:.0%} of the model; while it is "
                "gathered, little else can be; make units of its parts with --units",
            )
    if not units:
        yield Notice(
            "one-unit",
            "no repeated blocks were found, so the whole model is gathered at once; name units "
            "with --units",
        )


def _vocabulary(step: Step) -> Iterator[Notice]:
    for group in step.groups:
        for parameter in group.parameters if group.is_root else ():
            rows = parameter.shape[0] if len(parameter.shape) == 2 else 0
            if rows > 1000 and rows % VOCABULARY_MULTIPLE:
                more = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
                yield Notice(
                    "odd-vocabulary",
                    f"{parameter.name} has {rows:,} rows, which {VOCABULARY_MULTIPLE} does not "
                    f"divide; {more:,} rows make even shards and faster matrix products",
                )


def _communication(step: Step) -> Iterator[Notice]:
    if step.timing is None or step.timing.step_seconds == 0:
        return
    waits = sum(seconds for _, seconds in step.timing.exposed)
    if waits > 0.3 * step.timing.step_seconds:
        most = max(step.timing.exposed, key=lambda part: part[1])
        yield Notice(
            "exposed",
            f"{waits / step.timing.step_seconds:.0%} of the step waits for transfers, most for "
            f"{most[0]}; larger batches hide more",
        )


def pattern(name: str) -> str:
    """``blocks.3.mlp`` and its like under one name: ``blocks.*.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


CHECKS: tuple[Callable[[Step], Iterator[Notice]], ...] = (
    _not_run,
    _too_large,
    _tiny_shards,
    _padding,
    _codecs,
    _group_sizes,
    _vocabulary,
    _communication,
)
