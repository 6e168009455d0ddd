"""What plugins add to the time of a step: codes to make and read, shards to bring and take away.

Codecs read and write memory that compute would use. Transfers between a device and another tier
have a lane of their own, which hides behind compute as far as the machine can do both; a tier
called ``disk`` counts as the host. Where parameters rest on the host, the optimizer steps there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyshard.planning import GroupPlan
from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.estimate.machines import Machine
from polyshard_cli.plan.estimate.memory import STATES
from polyshard_cli.plan.estimate.timing import Span, Timing, Work
from polyshard_cli.plan.request.settings import OptimizerName


def with_overheads(
    timing: Timing,
    work: Work,
    tiers: Mapping[str, Any],
    machine: Machine,
    optimizer: OptimizerName,
) -> Timing:
    """``timing`` of ``work``, and what codecs and tiers add to it."""
    groups, passes = work.groups, work.micro_batches
    elements = [g.trainable_elements * g.plan.dtypes.orig.itemsize for g in groups]
    step = _optimizer(timing, sum(elements), tiers, machine, STATES[optimizer])
    rate = machine.codec_bytes_per_second or machine.memory_bytes_per_second
    added = {
        "encoding and decoding": sum(coded_bytes(g.plan, passes) for g in groups) / rate,
        "shards from and to other tiers": _exposed(
            sum(_staged_bytes(group, tiers, passes) for group in groups)
            / machine.host_bytes_per_second,
            timing.compute_seconds,
            machine,
        ),
    }
    waits = tuple((what, seconds) for what, seconds in added.items() if seconds)
    others = tuple(span for span in timing.spans if span.phase != "optimizer")
    start, stepped = timing.step_seconds - timing.optimizer_seconds, timing.step_seconds + step
    end = stepped + sum(seconds for _, seconds in waits)
    last = (
        Span("compute", "", "optimizer", start, stepped),
        Span("compute", "", "plugins", stepped, end),
    )
    return replace(
        timing,
        step_seconds=end,
        optimizer_seconds=timing.optimizer_seconds + step,
        exposed=(*timing.exposed, *waits),
        spans=(*others, *(span for span in last if span.end > span.start)),
    )


def _exposed(seconds: float, beside: float, machine: Machine) -> float:
    """What is left of transfers that run beside so many seconds of work."""
    return seconds - machine.overlap * min(seconds, beside)


def _optimizer(
    timing: Timing, nbytes: int, tiers: Mapping[str, Any], machine: Machine, states: int
) -> float:
    """Seconds that the optimizer takes longer, whose parameters take so many bytes."""
    if tiers["params"] != "device":
        if machine.is_host:
            return 0.0
        on_host = nbytes * (3 + 2 * states) / machine.host_bytes_per_second
        return max(0.0, on_host - timing.optimizer_seconds)
    if tiers["optimizer"] == "device":
        return 0.0
    # State comes and goes at the same time, each on its direction of the link, if there is one.
    turns = 2 if machine.is_host else 1
    passing = turns * states * nbytes * tiers["fraction"] / machine.host_bytes_per_second
    return _exposed(passing, timing.optimizer_seconds, machine)


def _staged_bytes(group: PlannedGroup, tiers: Mapping[str, Any], passes: int) -> int:
    """Shards to the device for each gather, and those of gradients from it, once."""
    plan = group.plan
    gathers = passes * (1 + (plan.reshard_after_forward is True))
    comes = gathers * plan.shard_bytes if tiers["params"] != "device" else 0
    goes = plan.shard_bytes if tiers["grads"] != "device" and group.trainable_elements else 0
    return comes + goes


def coded_bytes(plan: GroupPlan, passes: int = 1) -> int:
    """What codecs read and write: each shard and each code once, and what is decoded.

    Weights in each of so many forwards and backwards, gradients once.
    """
    world = plan.layout.world_size
    codes, total = plan.payloads, 0
    if codes.gather is not None:
        gathers = passes * (1 + bool(plan.reshard_after_forward))
        total += gathers * (plan.shard_bytes + (world + 1) * codes.gather + plan.unsharded_bytes)
    if codes.reduce is not None:
        total += plan.unsharded_bytes + 2 * world * codes.reduce + plan.shard_bytes
    if codes.replicas is not None:
        total += 2 * plan.shard_bytes + 2 * codes.replicas
    return total
