"""What ranks do in a cell: two steps, one in which something goes wrong, and two more."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded import Sharded, digest, state_of
from small_model import loss_of
from torch import Tensor, nn

import polyshard_resilience
from composition_table import Cell
from faults.plugin import Faulty, FaultyCodec, OwnCodec, Strike
from faults.processes import Uncaught, device_of_ranks
from polyshard.transport.collective import CollectiveGather
from polyshard.transport.gloo.messages import Works
from polyshard_checkpoint import Checkpoints

BEFORE, AFTER = 2, 2
"""Steps before the one that is lost, and after it (the first repeats it)."""


@dataclass
class Seen:
    """What one rank made of a cell. Digests are of all parameters and optimizer state."""

    part: int = 0
    kind: str = ""
    """Class of the error it met; empty if none."""
    text: str = ""
    at: float = 0.0
    """When, on the clock that all processes of a host share."""
    before: str = ""
    after: str = ""
    """Before the step that was lost, and after having recovered."""
    losses: list[float] = field(default_factory=list)
    end: str = ""

    def seconds(self, folder: str | Path) -> float:
        """From the fault to the error."""
        return self.at - float(mark_in(folder).read_text())


def mark_in(folder: str | Path) -> Path:
    """Where the moment of the fault is written."""
    return Path(folder, "moment")


class Struck(Sharded):
    """One rank that may fail."""

    def __init__(self, cell: Cell, folder: str, strike: Strike) -> None:
        """As told by ``strike``, on the device that ranks have."""
        self.strike = strike
        super().__init__(cell, folder, device=device_of_ranks())

    def _stack(self, cell: Cell, folder: str) -> tuple[Any, list[object], Any]:
        data, plugins, offload = super()._stack(cell, folder)
        kind = Faulty
        if self.strike.fault in ("encode", "decode", "bind"):
            kind = FaultyCodec if "quantized" in cell.stack else OwnCodec
        return data, [*plugins, kind(self.strike)], offload

    def whole_step(self, index: int) -> float:
        """Of training."""
        (loss,) = self.backward(index, 1, last=True)
        self.step()
        return loss

    def forward(self, index: int) -> Tensor:
        """The loss of a batch."""
        return loss_of(self.model, index, self.part)

    def recover(self) -> None:
        """What the errors say is to be done."""
        self.strike.disarm()
        self.model.reset_iter_state()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of all that is trained. A collective."""
        return digest(self.tensors())


# Faults in the step: the struck ranks prepare for them, then all ranks train ----------------------


def in_forward(trainee: Struck) -> None:
    """In the forward of a layer of the unit."""
    strike = trainee.strike
    layer: nn.Module = trainee.model.blocks[1].feed_forward
    layer.register_forward_pre_hook(lambda *_: strike.at(strike.fault))


def in_backward(trainee: Struck) -> None:
    """In the backward of a layer of the unit."""
    strike = trainee.strike

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: strike.at("backward"))

    trainee.model.blocks[1].feed_forward.register_forward_hook(hook)


def in_transfer(trainee: Struck) -> None:
    """Where the engine sends."""
    if trainee.device != "cpu":
        route: Any = CollectiveGather
        route.start = trainee.strike.around("transfer", CollectiveGather.start)
        return
    patched: Any = Works
    patched.post = trainee.strike.around("transfer", Works.post)


def in_optimizer(trainee: Struck) -> None:
    """In the optimizer's step."""
    optimizer: Any = trainee.optimizer
    optimizer.step = trainee.strike.around("optimizer", optimizer.step)


PREPARE: dict[str, Callable[[Struck], None]] = {
    "forward": in_forward,
    "memory": in_forward,
    "backward": in_backward,
    "transfer": in_transfer,
    "optimizer": in_optimizer,
}


def error_of(fault: str) -> BaseException:
    """What is raised."""
    if fault == "memory":
        return torch.OutOfMemoryError("on purpose")
    if fault == "transfer":
        return OSError("on purpose")
    return Uncaught("on purpose") if fault == "optimizer" else ArithmeticError("on purpose")


# Control flow: what struck ranks do instead of a step --------------------------------------------


def evaluation(trainee: Struck, index: int) -> None:
    """One more."""
    trainee.evaluate(index)
    trainee.whole_step(index)


def skipped(trainee: Struck, index: int) -> None:
    """As if the loss had not been finite."""
    trainee.forward(index)
    trainee.whole_step(index + 1)


def order(trainee: Struck, index: int) -> None:
    """Blocks from the last to the first."""
    with _blocks(trainee, lambda blocks: dict(zip(blocks, reversed(blocks.values()), strict=True))):
        trainee.whole_step(index)


def unused(trainee: Struck, index: int) -> None:
    """Without the first block."""
    with _blocks(trainee, lambda blocks: {"1": blocks["1"]}):
        trainee.whole_step(index)
        trainee.whole_step(index + 1)


@contextmanager
def _blocks(trainee: Struck, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    blocks: Any = trainee.model.blocks
    before = blocks._modules
    blocks._modules = change(dict(before))
    try:
        yield
    finally:
        blocks._modules = before


# Ends of a process: what the struck rank does instead of a step ----------------------------------


def killed(trainee: Struck, index: int) -> None:
    """At once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(trainee: Struck, index: int) -> None:
    """For good."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(trainee: Struck, index: int) -> None:
    """As if the data had come to an end."""
    sys.exit(0)


def loop(trainee: Struck, index: int) -> None:
    """Between two steps."""
    raise Uncaught("on purpose")


def attempted(trainee: Struck, is_struck: bool, index: int) -> None:
    """A step in an attempt, which the struck rank ends or does not come to."""
    fault = trainee.strike.fault
    if is_struck and fault == "attempt-loop":
        trainee.strike.mark()
        loop(trainee, index)
    with polyshard_resilience.attempt(trainee.model, trainee.optimizer):
        if is_struck and fault != "attempt-loop":
            trainee.strike.mark()
            INSTEAD[fault](trainee, index)
        if fault in ("attempt-killed", "attempt-stopped"):
            dist.barrier()
        trainee.whole_step(index)


def no_backward(trainee: Struck, index: int) -> None:
    """But the optimizer's step."""
    trainee.forward(index)
    trainee.step()


INSTEAD: dict[str, Callable[[Struck, int], None]] = {
    "evaluation": evaluation,
    "skipped": skipped,
    "order": order,
    "unused": unused,
    "killed": killed,
    "stopped": stopped,
    "exit": leave,
    "loop": loop,
    "keeper-killed": killed,
    "keeper-stopped": stopped,
    "attempt-killed": killed,
    "attempt-stopped": stopped,
    "attempt-skipped": no_backward,
    "attempt-exit": leave,
    "attempt-keeper-killed": killed,
}


# Cells -------------------------------------------------------------------------------------------


def strike_for(fault: str, folder: str) -> Strike:
    """Harmless yet."""
    return Strike(fault, lambda: error_of(fault), mark_in(folder))


def lost_step(trainee: Struck, is_struck: bool, seen: Seen, *, in_attempt: bool = False) -> None:
    """The step in which it happens; an error is noted, unless it is to end the process."""
    fault = trainee.strike.fault
    if is_struck and fault in PREPARE:
        PREPARE[fault](trainee)
    try:
        if fault.startswith("attempt-"):
            attempted(trainee, is_struck, BEFORE)
        elif in_attempt:
            with polyshard_resilience.attempt(trainee.model, trainee.optimizer):
                struck_step(trainee, is_struck)
        else:
            struck_step(trainee, is_struck)
        trainee.whole_step(BEFORE + 1)  # a rank may have been done when another failed
    except Uncaught:
        raise
    except Exception as error:
        note(seen, error)


def struck_step(trainee: Struck, is_struck: bool) -> None:
    """A step, or what the struck rank does instead of one."""
    fault, strike = trainee.strike.fault, trainee.strike
    if is_struck and fault in INSTEAD:
        strike.mark()
        INSTEAD[fault](trainee, BEFORE)
        return
    if is_struck:
        strike.arm()
    trainee.whole_step(BEFORE)


def note(seen: Seen, error: Exception) -> None:
    """What is compared with the table."""
    seen.at, seen.kind = time.monotonic(), type(error).__name__
    seen.text = "\n".join((str(error), *getattr(error, "__notes__", ())))


def undisturbed(rank: int, size: int, cell: Cell, fault: str, folder: str) -> Seen:
    """The oracle: the same steps without a fault."""
    trainee = Struck(cell, folder, strike_for(fault, folder))
    seen = Seen(trainee.part)
    seen.losses = [trainee.whole_step(index) for index in range(BEFORE)]
    seen.before = seen.after = trainee.digest()
    seen.losses += [trainee.whole_step(BEFORE + index) for index in range(AFTER)]
    seen.end = trainee.digest()
    return seen


def disturbed(
    rank: int,
    size: int,
    cell: Cell,
    fault: str,
    struck: tuple[int, ...],
    folder: str,
    in_attempt: bool = False,
) -> Seen:
    """Meet the error, recover in the process, and continue; a checkpoint is left in any case."""
    trainee = Struck(cell, folder, strike_for(fault, folder))
    seen = Seen(trainee.part)
    seen.losses = [trainee.whole_step(index) for index in range(BEFORE)]
    seen.before = trainee.digest()
    Checkpoints(f"{folder}/saved").save(BEFORE, state_of(trainee.model, trainee.optimizer))
    lost_step(trainee, rank in struck, seen, in_attempt=in_attempt)
    if fault in ENDS and not in_attempt:
        return seen
    trainee.recover()
    go_on(trainee, seen)
    return seen


ENDS = (
    *("optimizer", "loop", "exit", "killed", "stopped", "keeper-killed", "keeper-stopped"),
    *(f"attempt-{end}" for end in ("killed", "stopped", "loop", "exit", "keeper-killed")),
)


def go_on(trainee: Struck, seen: Seen) -> None:
    """The step that was lost, and one more."""
    seen.after = trainee.digest()
    seen.losses += [trainee.whole_step(BEFORE + index) for index in range(AFTER)]
    seen.end = trainee.digest()


def resumed(rank: int, size: int, cell: Cell, fault: str, folder: str) -> Seen:
    """What torchrun's new processes do."""
    trainee = Struck(cell, folder, strike_for(fault, folder))
    seen = Seen(trainee.part)
    restored = Checkpoints(f"{folder}/saved").load(state_of(trainee.model, trainee.optimizer))
    assert restored is not None
    assert restored.step == BEFORE
    go_on(trainee, seen)
    return seen


def planned(
    rank: int, size: int, cell: Cell, fault: str, struck: tuple[int, ...], folder: str
) -> Seen:
    """Fail while the model is sharded, repair that, and train."""
    strike = strike_for(fault, folder)
    if rank in struck:
        strike.arm()
    seen = Seen()
    try:
        Struck(cell, folder, strike).whole_step(0)
    except Exception as error:
        note(seen, error)
    dist.barrier()  # a rank that has repaired it before others looked takes its report back
    trainee = Struck(cell, folder, strike_for(fault, folder))
    seen.part = trainee.part
    seen.losses = [trainee.whole_step(index) for index in range(BEFORE)]
    seen.before = seen.after = trainee.digest()
    seen.losses += [trainee.whole_step(BEFORE + index) for index in range(AFTER)]
    seen.end = trainee.digest()
    return seen
