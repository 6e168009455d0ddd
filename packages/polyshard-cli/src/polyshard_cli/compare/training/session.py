"""A job under one engine on one rank, a step at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyshard_cli.compare.engines.building import build, units_to_shard
from polyshard_cli.compare.engines.built import Place
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.errors import JobError
from polyshard_cli.compare.job.loading import built, digest_of, draw_from, load
from polyshard_cli.compare.settings import Settings
from polyshard_cli.compare.training.memory import Memory, Meter
from polyshard_cli.compare.training.wire import sent_between, sent_so_far

__all__ = ["Facts", "Sample", "Session"]


@dataclass(frozen=True)
class Facts:
    """The job as this rank built it, before an engine had it.

    Attributes:
        parameters: elements of the whole model.
        trainable: those of them that are trained.
        units: modules that are sharded one by one, the model itself included.
        digest: a number for the values of every parameter and buffer.
    """

    parameters: int
    trainable: int
    units: int
    digest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Sample:
    """One step of one rank.

    Attributes:
        losses: of the batches this rank had: one, or those of all ranks in one process.
        seconds: from a barrier until the optimizer has stepped.
        wire_bytes: sent over TCP connections; ``None`` where the system does not say, or where
            ranks talk otherwise.
        counted_bytes: sent as the engine counts; ``None`` where it does not.
    """

    losses: tuple[float, ...]
    seconds: float
    wire_bytes: int | None
    counted_bytes: int | None


class Session:
    """Built, sharded, and stepped."""

    def __init__(self, settings: Settings, spec: Spec, place: Place) -> None:
        """Build the job and give it to the engine.

        Raises:
            JobError: for a job that no engine could train.
            Exception: whatever the engine raises.
        """
        self._settings, self._place = settings, place
        self._alone = spec.kind == "single"
        self._meter = Meter(place.device)
        job = built(settings, load(settings))
        units = units_to_shard(job, settings.units)
        parameters = list(job.model.parameters())
        self.facts = Facts(
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            len(units) + 1,
            digest_of(job.model),
        )
        self._job = job
        draw_from(settings.seed, "engine")
        self._built = build(spec, job, tuple(units.values()), place)
        if not isinstance(self._built.optimizer, torch.optim.Optimizer):
            raise JobError(
                f"JOB {settings.job}: optimizer returned a {type(self._built.optimizer).__name__}; "
                "it must return a torch.optim.Optimizer"
            )
        self._built.model.train()
        self._meter.begin_steps()

    def step(self, index: int) -> Sample:
        """One optimizer step; all ranks of the engine begin it together."""
        ranks = self._settings.ranks
        own = range(ranks) if self._alone else (self._place.rank,)
        batches = [self._batch(index, rank) for rank in own]
        counted = self._built.counted
        moved = counted() if counted else 0
        if not self._alone:
            dist.barrier()
        self._wait()
        before = sent_so_far()
        begin = time.perf_counter()
        losses = []
        for rank, batch in zip(own, batches, strict=True):
            draw_from(self._settings.seed, "step", index, rank)
            loss = self._loss(batch)
            (loss / len(own) if self._alone else loss).backward()
            losses.append(loss.detach())
        self._built.optimizer.step()
        self._built.optimizer.zero_grad()
        self._wait()
        seconds = time.perf_counter() - begin
        wire = sent_between(before, sent_so_far()) if self._over_tcp else None
        return Sample(
            tuple(float(loss) for loss in losses),
            seconds,
            wire,
            counted() - moved if counted else None,
        )

    def memory(self) -> Memory:
        """What the steps so far took."""
        return self._meter.read()

    def plan(self) -> str | None:
        """What the engine says it does to each group; ``None`` for those that say nothing."""
        return self._built.plan() if self._built.plan else None

    def _wait(self) -> None:
        """For what was launched on an accelerator."""
        if self._place.device.type != "cpu":
            torch.accelerator.synchronize()

    @property
    def _over_tcp(self) -> bool:
        return self._place.device.type == "cpu"

    def _batch(self, index: int, rank: int) -> Any:
        draw_from(self._settings.seed, "batch", index, rank)
        try:
            batch = self._job.batch(index, rank, self._settings.ranks)
        except Exception as error:
            raise JobError(
                f"JOB {self._settings.job}: batch(step={index}, rank={rank}, "
                f"ranks={self._settings.ranks}) raised {type(error).__name__}: {error}"
            ) from error
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._place.device), batch)

    def _loss(self, batch: Any) -> Tensor:
        loss: object = self._job.loss(self._built.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise JobError(
                f"JOB {self._settings.job}: loss(model, batch) returned {what}; it must return one "
                "number that depends on the model, a 0-dim tensor"
            )
        return loss
