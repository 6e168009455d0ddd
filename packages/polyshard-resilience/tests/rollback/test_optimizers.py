"""What an optimizer keeps beside its state is put back after a step that failed."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import AdamW
from toy_optimizers import Shelf, same_bits

from polyshard_optimizers import flat
from polyshard_resilience.rollback.optimizers import OptimizerUndo, StepMemory


class FailsHalfway(AdamW):
    """Has stepped when it raises, on demand."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise MemoryError("half way")


def test_a_step_that_failed_is_rolled_back_with_its_counters() -> None:
    stepped = []
    for make in (FailsHalfway, lambda params: flat(FailsHalfway(params), elementwise=True)):
        shelf = Shelf((8, 16))
        optimizer: Any = make(shelf.params)
        for _ in range(4):
            shelf.give_gradients()
            optimizer.step()
        shelf.give_gradients()
        undo = OptimizerUndo(optimizer)
        undo.keep(StepMemory())
        optimizer.fails = True
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.fails = False
        undo.put_back()
        for _ in range(3):
            optimizer.step()
        stepped.append([*shelf.params, *(s["step"] for s in optimizer.state.values())])
    assert all(same_bits(one, other) for one, other in zip(*stepped, strict=True))
