"""Two ranks on this machine that train a step, compared with one process."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard_cli.checks import Finding, State

RANKS = 2
HOST = "127.0.0.1"
SECONDS = 120.0
"""To import torch, meet, and train one step, on a busy machine."""


def self_test(seconds: float = SECONDS) -> Iterator[Finding]:
    """Start two ranks, and say whether they learn what one process does."""
    begin = time.monotonic()
    answers = _answers(seconds)
    failed = {rank: text for rank, (text, _) in answers.items() if text}
    if failed:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
        yield Finding("two ranks", State.PROBLEM, said)
    elif len(answers) < RANKS:
        silent = sorted(set(range(RANKS)) - set(answers))
        text = f"ranks {silent} did not answer within {seconds:g} s; is a firewall on loopback?"
        yield Finding("two ranks", State.PROBLEM, text)
    elif any(found != _expected() for _, found in answers.values()):
        yield Finding(
            "two ranks", State.PROBLEM, "weights after a step differ from those of one process"
        )
    else:
        text = f"trained a step, equal to one process, {time.monotonic() - begin:.0f} s"
        yield Finding("two ranks", State.FINE, text)


def _answers(seconds: float) -> dict[int, tuple[str, list[float]]]:
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(rank, store.port, seconds / 2, said), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    answers: dict[int, tuple[str, list[float]]] = {}
    ends = time.monotonic() + seconds
    while len(answers) < RANKS and time.monotonic() < ends:
        try:
            rank, *answer = said.get(timeout=0.2)
        except queue.Empty:
            if not any(process.is_alive() for process in ranks) and said.empty():
                break
            continue
        answers[rank] = (answer[0], answer[1])
    for process in ranks:
        process.join(1.0 if len(answers) == RANKS else 0.0)
        if process.is_alive():
            process.kill()
    return answers


def _rank(rank: int, port: int, seconds: float, said: Any) -> None:
    try:
        torch.set_num_threads(1)
        patience = timedelta(seconds=seconds)
        store = dist.TCPStore(HOST, port, is_master=False, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
        found = _sharded_step(rank)
        dist.destroy_process_group()
        said.put((rank, "", found))
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        said.put((rank, last, []))


def _sharded_step(rank: int) -> list[float]:
    from polyshard import fully_shard

    model = _model()
    fully_shard(model)
    _step(model, _batch()[rank::RANKS])
    return [
        value
        for parameter in model.parameters()
        for value in parameter.full_tensor().flatten().tolist()  # type: ignore[attr-defined]
    ]


def _expected() -> list[float]:
    """The same step in this process; sums of two halves, as two ranks have them."""
    model = _model()
    halves = [_batch()[rank::RANKS] for rank in range(RANKS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for half in halves:
        (model(half).square().mean() / RANKS).backward()
    optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def _step(model: nn.Module, batch: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch).square().mean().backward()
    optimizer.step()


def _model() -> nn.Module:
    """Powers of two everywhere, so that sums in any order are the same."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model


def _batch() -> Tensor:
    return torch.arange(16.0, device="cpu").reshape(4, 4) / 16
