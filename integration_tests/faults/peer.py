"""One rank of torch's own FSDP2 that may fail: ``torchrun -m faults.peer FOLDER GROUP FAULT``.

With ``TORCHFT_LIGHTHOUSE`` in the environment it is one of a replica group under torchft, in the
way torchft's users write that. ``FAULT`` strikes rank 1; ``none`` is a run without.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_model import build, loss_of, optimizer_for
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from composition_table import FSDP, Cell
from fault_table import PEER_GROUPS, PEER_TIMEOUT_SECONDS, STRUCK
from faults.training import BEFORE, PREPARE, strike_for, struck_step

TIMEOUT = timedelta(seconds=PEER_TIMEOUT_SECONDS)
PAUSE_SECONDS = 0.05
"""Of a step under torchft: groups train until one that was struck is back."""
TWO_BATCHES = ("skipped", "unused")
"""Faults that take the next batch too."""


class Peer:
    """What :class:`faults.training.Struck` is to polyshard: faults strike at the same places."""

    def __init__(self, folder: Path, group: int, fault: str) -> None:
        """The same model, batches and optimizer, sharded by torch."""
        self.strike = strike_for(fault, str(folder))
        self.part = group * dist.get_world_size() + dist.get_rank()
        self.model: Any = build(Cell((), FSDP, "fp32", "plain"))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = optimizer_for(self.model)
        self.stepped: Any = self.optimizer
        self.manager: Any = None
        self.number = 0
        """Steps that were made."""
        self._log = folder / f"{group}-{dist.get_rank()}-{os.getpid()}.jsonl"

    def join(self, group: int) -> None:
        """Make this a rank of a replica group."""
        import torchft

        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=f"group_{group}",
        )
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda total: self.manager.allreduce(total).wait())
        self.stepped = torchft.Optimizer(self.manager, self.optimizer)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, found: dict[str, Any]) -> None:
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])

    def forward(self, index: int) -> Tensor:
        """The beginning of a step; under torchft, groups are counted here."""
        self.stepped.zero_grad()
        return loss_of(self.model, index, self.part)

    def whole_step(self, index: int) -> None:
        """Of training, as in torch's tutorial."""
        before = self.number
        self.forward(index).backward()
        self.stepped.step()
        if self.manager is None:
            self.number += 1
        else:
            self.number = int(self.manager.current_step())
        self.note("step", number=self.number, lost=self.number == before, digest=self.digest())

    def evaluate(self, index: int) -> None:
        """A forward in eval mode."""
        self.model.eval()
        with torch.no_grad():
            loss_of(self.model, index, self.part)
        self.model.train()

    @property
    def is_joined(self) -> bool:
        """Whether all groups have trained together."""
        return self.manager is None or self.manager.num_participants() == PEER_GROUPS

    def digest(self) -> str:
        """Of this rank's shards."""
        total = hashlib.sha256()
        for parameter in self.model.parameters():
            total.update(parameter.detach().to_local().contiguous().numpy().tobytes())
        return total.hexdigest()[:16]

    def note(self, event: str, **values: Any) -> None:
        """What the harness reads."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n")


def is_over(folder: Path, index: int) -> bool:
    """Whether so many steps are all; the harness says how many in ``stop``."""
    stop = folder / "stop"
    return stop.exists() and index >= int(stop.read_text("utf-8"))


def train(peer: Any, folder: Path, is_struck: bool) -> None:
    """Until it is over."""
    index = 0
    while not is_over(folder, index):
        if is_struck and index >= BEFORE and peer.is_joined:
            fault = peer.strike.fault
            is_struck = False
            if fault in PREPARE:
                PREPARE[fault](peer)
            struck_step(peer, True)
            index += 2 if fault in TWO_BATCHES else 1
        else:
            peer.whole_step(index)
            index += 1
        if peer.manager is not None:
            index = peer.number  # another group's, after healing
            time.sleep(PAUSE_SECONDS)


def main() -> None:
    """Read the command line, and train; exceptions are noted and end the process."""
    folder, group, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    peer = Peer(folder, group, fault)
    peer.note("start")
    try:
        if "TORCHFT_LIGHTHOUSE" in os.environ:
            peer.join(group)
        train(peer, folder, fault != "none" and dist.get_rank() == STRUCK)
    except Exception as error:
        peer.note("raised", kind=type(error).__name__, text=str(error).partition("\n")[0])
        raise
    peer.note("done")
    if peer.manager is not None:
        os._exit(0)  # torchft's threads wait for their servers
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
