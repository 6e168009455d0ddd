"""Whatever ends a rank's step, its peers learn of it long before any time-out, and all continue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_codecs import Codecs
from toy_meeting import await_all

from polyshard import Observer, fully_shard, hookimpl
from polyshard.agreement import meeting
from polyshard.errors import ControlFlowError, PeerError
from polyshard_resilience import handler
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.current import current_alarm
from polyshard_testing import ranks

WIDTH = 8
PATIENT_SECONDS = 10.0
"""Far below the time-out of the process group (60 s), far above what it takes on a busy machine."""


class Layer(nn.Module):
    """Does as it is told, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_forward: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward is not None:
            self.in_forward()
        y: Tensor = self.linear(x)
        told = self.in_backward
        if told is not None:
            y.register_hook(lambda _: told())
        return y


def build(plugins: Any = (), **keywords: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in model:
        fully_shard(layer, plugins=plugins, **keywords)
    return fully_shard(model, plugins=plugins, **keywords)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(inputs()).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def fail() -> None:
    raise ArithmeticError("on purpose")


def seconds_to(kind: type[Exception], pattern: str, work: Callable[[], object]) -> float:
    begin = time.monotonic()
    with pytest.raises(kind, match=pattern):
        work()
    return time.monotonic() - begin


def losses(steps: int) -> list[float]:
    """Of a model that nothing happens to, on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return [step(model, optimizer) for _ in range(steps)]


def recovers(fault: Callable[[Any, int], None], pattern: str, rank: int) -> None:
    """All ranks raise soon, and then continue as if nothing had happened."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = [step(model, optimizer) for _ in range(2)]
    fault(model, rank)
    kind, pattern = (ArithmeticError, "on purpose") if rank == 1 else (PeerError, pattern)
    assert seconds_to(kind, pattern, lambda: step(model, optimizer)) < PATIENT_SECONDS
    model[2].in_forward = model[2].in_backward = None
    model.reset_iter_state()
    optimizer.zero_grad()
    found += [step(model, optimizer) for _ in range(2)]
    assert found == pytest.approx(losses(4))


def breaks_forward(model: Any, rank: int) -> None:
    if rank == 1:
        model[2].in_forward = fail


def breaks_backward(model: Any, rank: int) -> None:
    if rank == 1:
        model[2].in_backward = fail


@ranks(2)
def test_an_exception_in_forward(rank: int, size: int) -> None:
    pattern = r"rank 1 failed in the forward of '2': ArithmeticError: on purpose.*reset_iter_state"
    recovers(breaks_forward, pattern, rank)


@ranks(3)
def test_an_exception_in_forward_of_three(rank: int, size: int) -> None:
    recovers(breaks_forward, r"rank 1 failed in the forward of '2'", rank)


@pytest.mark.skipif(
    sys.gettrace() is not None, reason="exceptions are quoted by a tracer, of which there is one"
)
@ranks(2)
def test_an_exception_in_backward_is_quoted_too(rank: int, size: int) -> None:
    """Others wait for the rank to quote it, which takes a second here."""
    add_detail = Alarm.add_detail

    def slowly(alarm: Alarm, error: BaseException) -> None:
        time.sleep(1.0)
        add_detail(alarm, error)

    pattern = r"rank 1 failed in its backward, when it had reached '3': ArithmeticError: on purpose"
    with mock.patch.object(Alarm, "add_detail", slowly):
        recovers(breaks_backward, pattern, rank)


@ranks(2)
def test_a_quotation_that_may_not_come_is_hardly_waited_for(rank: int, size: int) -> None:
    """Autograd was called from no Python frame, as in the thread that a device has."""
    with (
        mock.patch.object(handler, "_can_ask", return_value=False),
        mock.patch.object(handler, "QUOTE_SECONDS", 2 * PATIENT_SECONDS),
    ):
        recovers(breaks_backward, "when it had reached '3'[.] Fix", rank)


@ranks(2)
def test_again_and_again(rank: int, size: int) -> None:
    for _ in range(5):
        recovers(breaks_forward, r"failed in the forward of '2'", rank)
        recovers(breaks_backward, r"failed in its backward", rank)


class Broken(Observer):
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        if dist.get_rank() == 1 and group == "1":
            raise OSError("the log is full")

    @hookimpl
    def polyshard_observer(self, group: object) -> Broken:
        return Broken()


class Observed(Codecs):
    name = "observed"

    @hookimpl
    def polyshard_observer(self, group: object) -> Broken:
        return Broken()


@ranks(2)
def test_an_observer(rank: int, size: int) -> None:
    model = build([Observed()])
    if rank == 1:
        with pytest.raises(OSError, match="the log is full"):
            model(inputs()).sum().backward()
    else:
        pattern = "rank 1 failed .*OSError: the log is full"

        def steps() -> None:
            for _ in range(2):
                model(inputs()).sum().backward()

        assert seconds_to(PeerError, pattern, steps) < PATIENT_SECONDS
    model.reset_iter_state()


@ranks(4)
def test_replicas(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model = build(mesh=mesh)
    model(inputs()).sum().backward()
    await_all("stepped", size)  # a failure in the next step would end this one for ranks behind
    if rank == 1:
        model[1].in_backward = fail
    kind, pattern = (ArithmeticError, "") if rank == 1 else (PeerError, "rank 1 failed in its back")
    assert seconds_to(kind, pattern, lambda: model(inputs()).sum().backward()) < PATIENT_SECONDS
    model[1].in_backward = None
    model.reset_iter_state()
    model(inputs()).sum().backward()


@ranks(2)
def test_another_model_goes_on_without_a_word(rank: int, size: int) -> None:
    first, second = build(), build()
    second(inputs()).sum().backward()
    breaks_forward(first, rank)
    kind: type[Exception] = ArithmeticError if rank == 1 else PeerError
    with pytest.raises(kind):
        first(inputs()).sum().backward()
    second(inputs()).sum().backward()


@ranks(2)
def test_the_process_group_of_the_mesh_is_left_alone(rank: int, size: int) -> None:
    model = build()
    model(inputs()).sum().backward()
    breaks_forward(model, rank)
    with pytest.raises((ArithmeticError, PeerError)):
        model(inputs()).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


# Control flow -------------------------------------------------------------------------------------


def apart(model: Any, rank: int, work: Callable[[], None], *patterns: str) -> None:
    """All ranks say that they are apart, where each is, and start again."""
    begin = time.monotonic()
    with pytest.raises(ControlFlowError) as caught:
        work()
    assert time.monotonic() - begin < PATIENT_SECONDS
    for pattern in patterns:
        assert pattern in str(caught.value)
    model.reset_iter_state()
    model(inputs()).sum().backward()


@ranks(2)
def test_an_evaluation_on_one_rank(rank: int, size: int) -> None:
    model = build()
    model(inputs()).sum().backward()

    def work() -> None:
        if rank == 1:
            with torch.no_grad():
                model(inputs())
        model(inputs()).sum().backward()

    apart(
        model,
        rank,
        work,
        "rank 0 is at group '3' in the backward of forward 2",
        "rank 1 is at group '0' in forward 3",
    )


@ranks(2)
def test_layers_in_another_order(rank: int, size: int) -> None:
    model = build()
    model(inputs()).sum().backward()

    order = [0, 2, 1, 3] if rank == 1 else [0, 1, 2, 3]

    def forward(x: Tensor) -> Tensor:
        for index in order:
            x = model[index](x)
        return x

    model.forward = forward

    def work() -> None:
        for _ in range(2):
            model(inputs()).sum().backward()

    assert seconds_to(ControlFlowError, "wait for each other", work) < PATIENT_SECONDS
    model.reset_iter_state()


@ranks(2)
def test_a_layer_that_one_rank_skips(rank: int, size: int) -> None:
    model = build(reshard_after_forward=True)
    order = [0, 1, 3] if rank == 1 else [0, 1, 2, 3]

    def forward(x: Tensor) -> Tensor:
        for index in order:
            x = model[index](x)
        return x

    model(inputs()).sum().backward()
    model.forward = forward

    def work() -> None:
        for _ in range(3):
            model(inputs()).sum().backward()

    begin = time.monotonic()
    with pytest.raises((ControlFlowError, PeerError, ValueError)):
        work()
    assert time.monotonic() - begin < PATIENT_SECONDS
    model.reset_iter_state()


@ranks(2)
def test_a_slow_rank_is_waited_for(rank: int, size: int) -> None:
    model = build()
    if rank == 1:
        model[2].in_forward = lambda: time.sleep(1.5)
    model(inputs()).sum().backward()
    assert current_alarm().report is None


@ranks(2)
def test_a_rank_that_is_slow_to_see_that_all_have_come(rank: int, size: int) -> None:
    """The last that comes waits in its first transfer, for one that looks late."""
    model = build()

    def seldom(_: int) -> Iterator[None]:
        while True:
            yield
            time.sleep(2.0)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(meeting, "_pauses", seldom)
        else:
            time.sleep(0.5)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert current_alarm().report is None
