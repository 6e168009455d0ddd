"""The oracle: the same training in one process, without the engine.

What makes a stack lossy is done to whole tensors here: bf16 copies of fp32 masters, and the round
trip of the quantized format through what a rank would send. Sums are in the order of the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from small_model import build, loss_of, optimizer_for, prepare
from torch import Tensor, nn
from training import Outcome, train

from composition_table import Cell

COLUMNS = ("attention.output", "feed_forward.down")
"""Layers whose inputs tensor parallelism divides; of all others it divides the outputs."""


class OneProcess:
    """A :class:`training.Trainee` that holds everything."""

    def __init__(self, cell: Cell) -> None:
        """Masters, and the copies that are computed with."""
        self._cell = cell
        self._masters = build(cell)
        self._optimizer = optimizer_for(self._masters)
        self._working = build(cell)
        prepare(self._working, cell)
        self._refresh()
        self._forget()

    def backward(self, index: int, micro_batches: int, *, last: bool) -> list[float]:
        """Every part in turn; gradients of a part add up in fp32."""
        losses = []
        for part, held in enumerate(self._held):
            self._working.zero_grad()
            loss = loss_of(self._working, index, part) / micro_batches
            loss.backward()
            losses.append(loss.item())
            for name, parameter in self._working.named_parameters():
                assert parameter.grad is not None
                gradient = parameter.grad.float()
                held[name] = held[name] + gradient if name in held else gradient.clone()
        if last:
            for name, master in self._masters.named_parameters():
                master.grad = self._sum(name) / len(self._held)
        return losses

    def clip(self, max_norm: float) -> float:
        """As torch does."""
        return nn.utils.clip_grad_norm_(self._masters.parameters(), max_norm).item()

    def step(self) -> None:
        """Step the masters."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._refresh()
        self._forget()

    def evaluate(self, index: int) -> list[float]:
        """Every part in turn."""
        self._working.eval()
        with torch.no_grad():
            losses = [loss_of(self._working, index, p).item() for p in range(len(self._held))]
        self._working.train()
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """The masters and their state."""
        found = {}
        for name, master in self._masters.named_parameters():
            found[name] = master.detach()
            for key, value in self._optimizer.state[master].items():
                found[f"{name}:{key}"] = value
        return found

    def _forget(self) -> None:
        self._held: list[dict[str, Tensor]] = [{} for _ in range(self._cell.layout.parts)]

    def _refresh(self) -> None:
        """What ranks have after a gather."""
        dtype = torch.bfloat16 if self._cell.dtype == "bf16" else torch.float32
        masters = dict(self._masters.named_parameters())
        for name, parameter in self._working.named_parameters():
            parameter.data = self._sent(name, masters[name].detach()).to(dtype, copy=True)
            parameter.grad = None

    def _sum(self, name: str) -> Tensor:
        """Over the shard axis, then over the replicas: on either, what is sent is rounded."""
        terms = [self._sent(name, held[name]) for held in self._held]
        layout = self._cell.layout
        if layout.shards > 1:
            starts = range(0, len(terms), layout.shards)
            terms = [_added(terms[start : start + layout.shards]) for start in starts]
            if layout.replicas > 1:
                terms = [self._sent(name, term) for term in terms]
        return _added(terms)

    def _sent(self, name: str, value: Tensor) -> Tensor:
        """What others read of ``value``."""
        if "quantized" not in self._cell.stack or value.ndim < 2:
            return value
        from polyshard_quantized import Int8Block, round_trip

        dim = 1 if any(layer in name for layer in COLUMNS) else 0
        parts = value.chunk(self._cell.layout.tensor, dim)
        return torch.cat([round_trip(part.contiguous(), Int8Block()) for part in parts], dim)


def _added(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


@contextmanager
def like_a_rank() -> Iterator[None]:
    """One thread: sums over several are in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def outcome_of(cell: Cell) -> Outcome:
    """What the ranks of ``cell`` are compared with."""
    import torch._dynamo as dynamo

    with like_a_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo asks what a block's input has for .grad
        outcome = train(OneProcess(cell), cell.feature)
    if cell.feature == "compiled":
        dynamo.reset()
    return outcome
