"""No wait for a message of gloo is for nothing: without any one of them something is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from late_messages import Mail, problems_of
from torch import Tensor, nn
from toy_codecs import Codecs

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.errors import GradientMismatchError
from polyshard_testing.streams.mutants import Mutant, Survival, mutants

WIDTH = 6


def sharded(**keywords: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer, **keywords)
    return fully_shard(model, **keywords)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def step(model: Any, mail: Mail, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(inputs()).square().sum()
        loss.backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        if not all(bool(g.isfinite().all()) for g in (loss, *gradients)):
            mail.problems.append("numbers that had not arrived were used")
        optimizer.step()
        optimizer.zero_grad()


def trained(mail: Mail) -> None:
    step(sharded(), mail)


def cast(mail: Mail) -> None:
    step(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), mail)


def coded(mail: Mail) -> None:
    step(sharded(plugins=[Codecs()]), mail)


def failed_in_backward(mail: Mail) -> None:
    model = sharded()
    model.set_reduce_scatter_max_input_buffers(3)
    handle = model[0].register_full_backward_pre_hook(_fail)
    with pytest.raises(ArithmeticError):
        model(inputs()).square().sum().backward()
    handle.remove()
    model.reset_iter_state()
    step(model, mail, 1)


def _fail(module: nn.Module, gradients: Any) -> None:
    raise ArithmeticError("in mid-backward")


def told_of_others(mail: Mail) -> None:
    """The peer says that it has fewer gradients, and is answered."""
    model = sharded()

    def fewer(message: Tensor) -> Tensor:
        return message if message.dtype.is_floating_point else message & ~2

    mail.answer_with = fewer
    with pytest.raises(GradientMismatchError):
        model(inputs()).square().sum().backward()
    mail.answer_with = lambda own: own
    model.reset_iter_state()


def by_hand(mail: Mail) -> None:
    model = sharded()
    step(model, mail, 1)
    model[0].unshard(async_op=True)
    model[0].reshard()
    model[1].unshard(async_op=True)  # of another turn than the forward that looks at it
    step(model, mail, 1)


PROGRAMS = (trained, cast, coded, failed_in_backward, told_of_others, by_hand)
MODULES = (
    "polyshard.transport.gloo.point_to_point",
    "polyshard.transport.gloo.messages",
    "polyshard.transport.gloo.presence",
    "polyshard.program.reduce",
    "polyshard.program.unshard",
)
WHOLE = {"all_reduce_over", "all_gather_over"}
"""Calls that return when all has arrived: what they send is not used otherwise meanwhile."""
LANDING = "Reducer._land"
"""No program here has gradients that land whole: program/test_landing.py has."""
MUTANTS = [
    m
    for m in mutants(MODULES)
    if m.text.endswith(".wait()") and m.function not in {*WHOLE, LANDING}
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_message_is_waited_for(program: Any) -> None:
    assert problems_of(program) == []


@pytest.fixture(scope="module")
def survival() -> Survival:
    return Survival({p.__name__: partial(problems_of, p) for p in PROGRAMS})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.module}-{m.function}-{m.line}")
def test_without_it_something_is_wrong(mutant: Mutant, survival: Survival) -> None:
    assert survival.end_of(mutant) is not None, f"nothing fails with {mutant}"
