"""One case on real ranks. What is compared is gathered on all of them, so all find the same."""

from __future__ import annotations

import functools
import re
import tempfile
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fuzzing.build import batch, loss_of
from fuzzing.case import (
    Action,
    ByHand,
    Case,
    Clip,
    Evaluate,
    Fail,
    Mesh,
    Save,
    Step,
    Train,
    Write,
    Zero,
    parse,
)
from fuzzing.oracle import DeliberateError, Oracle, failing
from fuzzing.saving import WAYS, WRITES
from fuzzing.sharded import Sharded
from polyshard import clip_grad_norm_
from polyshard.errors import PolyshardError


@dataclass(frozen=True)
class Outcome:
    """What came of a case on one rank.

    ``kind``: ``"passed"``, ``"refused"`` (a polyshard error before anything was communicated),
    ``"different"`` or ``"raised"``.
    """

    kind: str
    text: str = ""


class DifferenceError(AssertionError):
    """The sharded model does not do what one process does."""


def is_ready(rank: int, size: int) -> None:
    """Answer: starting ranks takes seconds that are not a case's."""


def on_ranks(rank: int, size: int, text: str, folder: str) -> tuple[str, str]:
    """Run the case whose ``repr`` is ``text``; an exception is written to ``folder`` as well.

    A rank that raised alone leaves its peers waiting: what it wrote can be read meanwhile.
    """
    outcome = _outcome(rank, text, folder)
    if outcome.kind != "passed":
        Path(folder, f"rank{rank}.txt").write_text(f"{outcome.kind}: {outcome.text}")
    return outcome.kind, outcome.text


def _outcome(rank: int, text: str, folder: str) -> Outcome:
    case = parse(text)
    mesh = mesh_of(case.mesh)
    everyone = ranks_of(case.mesh.ranks)
    if rank >= case.mesh.ranks:
        return Outcome("passed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = Run(case, mesh, everyone, Path(folder))
        except PolyshardError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception:
            return Outcome("raised", traceback.format_exc())
        try:
            run.script()
        except DifferenceError as error:
            return Outcome("different", str(error))
        except Exception:
            return Outcome("raised", f"in {run.where}\n{traceback.format_exc()}")
    return Outcome("passed")


@functools.cache
def mesh_of(shape: Mesh) -> DeviceMesh:
    """Made once in each process, by all of them, so that process groups do not pile up."""
    ranks = torch.arange(shape.ranks).view(shape.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=shape.names)


@functools.cache
def ranks_of(count: int) -> Any:
    """The first ``count`` ranks, to agree on what was found; made by all processes."""
    return dist.new_group(list(range(count)))


class Run:
    """A sharded model, its oracle, and what a script does to both."""

    def __init__(self, case: Case, mesh: DeviceMesh, everyone: Any, folder: Path) -> None:
        self.case, self.everyone, self.folder = case, everyone, folder
        self.data_rank = dist.get_rank() // max(case.mesh.tensor, 1)
        self.where = "sharding"
        self.micro = 0
        self.hold_still = False
        """Whether parameters stay gathered until a step, whatever is written to shards."""
        self.saves = 0
        self.sharded = Sharded(case, mesh, folder)
        self.model: Any = self.sharded.model
        self.optimizer = self.sharded.new_optimizer()
        self.oracle = Oracle(case, self.sharded.rounded())
        self.differences: list[str] = []

    def zero(self, *, to_none: bool) -> None:
        """Not the model's ``zero_grad``: it may hold unsharded parameters now."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=to_none)
        self.oracle.zero(to_none=to_none)

    # Script -----------------------------------------------------------------------------------

    def script(self) -> None:
        """Run all actions, comparing after each."""
        self.compare_parameters(exact=True)
        for number, action in enumerate(self.case.script):
            self.where = f"action {number}, {action}"
            self.act(action)
        self.where = "the end"
        self.compare_state()

    def act(self, action: Action) -> None:
        """Do one thing to both models."""
        match action:
            case Train():
                self.train(action)
            case Evaluate():
                self.evaluate(action)
            case Clip():
                self.clip(action)
            case Step():
                self.step()
            case Zero():
                self.zero(to_none=action.to_none)
                self.compare_gradients()
            case Save():
                self.save(action)
            case Write():
                self.write(action)
            case ByHand():
                self.by_hand(action)
            case Fail():
                self.fail(action)

    def train(self, action: Train) -> None:
        model, first = self.model, self.micro
        self.micro += action.forwards
        model.set_requires_gradient_sync(action.sync)
        if self.case.mesh.replicas:
            model.set_requires_all_reduce(action.all_reduce)
        model.set_reshard_after_backward(not action.keep)
        self.hold_still = action.keep and not action.sync
        flows = [model(batch(self.case, first + i, self.data_rank)) for i in range(action.forwards)]
        losses = [loss_of(flow, first + i) for i, flow in enumerate(flows)]
        losses = [loss for loss in losses if loss.requires_grad]
        if action.joint and losses:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
        found = [flow[0].detach() for flow in flows]
        del flows, losses
        if self.case.mesh.replicas:
            action = replace(action, sync=action.sync and action.all_reduce)
        expected = self.oracle.train(action, first, self.data_rank)
        for ours, theirs in zip(found, expected, strict=True):
            self.compare_outputs(ours, theirs)
        self.agree()
        self.compare_gradients()

    def evaluate(self, action: Evaluate) -> None:
        self.model.train(action.training)
        with torch.inference_mode() if action.inference else torch.no_grad():
            out = self.model(batch(self.case, self.micro, self.data_rank))[0].clone()
        self.model.train()
        self.compare_outputs(out, self.oracle.evaluate(self.micro, self.data_rank))
        self.agree()

    def clip(self, action: Clip) -> None:
        trained = [p for p in self.sharded.parameters.values() if p.requires_grad]
        found = clip_grad_norm_(trained, action.max_norm, action.norm_type)
        expected = float(self.oracle.norm(action.norm_type))
        if not torch.isclose(found.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-7):
            self.differ(f"norm {found.item()} instead of {expected}")
        self.agree()
        # As torch does it, in the dtype of the norm.
        self.oracle.scale_gradients((action.max_norm / (found + 1e-6)).clamp(max=1.0).item())
        self.oracle.settle()
        self.compare_gradients()

    def step(self) -> None:
        self.oracle.step()
        self.hold_still = False
        if self.optimizer is not None:
            self.optimizer.step()
        self.compare_parameters(exact=False)

    def save(self, action: Save) -> None:
        self.saves += 1
        folder = self.folder / f"checkpoint{self.saves}"
        load = WAYS[action.how](self.model, folder, self.everyone)
        with torch.no_grad():
            for parameter in self.sharded.parameters.values():
                if parameter.is_floating_point():
                    parameter.add_(1.0)
        load()
        self.compare_state()
        if action.how == "assign":
            self.sharded.refresh()
            self.optimizer = self.sharded.new_optimizer()
            self.oracle.optimizer = self.oracle.new_optimizer()
            self.zero(to_none=True)
        self.compare_parameters(exact=True)

    def write(self, action: Write) -> None:
        floats = [p for p in self.sharded.parameters.values() if p.is_floating_point()]
        if floats:
            with torch.no_grad():
                WRITES[action.how](floats)
        self.oracle.halve()
        self.compare_parameters(exact=True)
        if self.hold_still:  # see set_reshard_after_backward
            for unit in self.sharded.units:
                unit.reshard()

    def by_hand(self, action: ByHand) -> None:
        unit = self.sharded.units[action.unit % len(self.sharded.units)]
        handle = unit.unshard(async_op=not action.wait)
        if handle is not None and action.reshard:
            handle.wait()
        if action.reshard:
            unit.reshard()

    def fail(self, action: Fail) -> None:
        last = list(self.model.children())[-1]
        self.model.set_requires_gradient_sync(True)
        with failing(last, backward=action.backward):
            try:
                loss = loss_of(self.model(batch(self.case, self.micro, self.data_rank)), 0)
                if loss.requires_grad:
                    loss.backward()
            except DeliberateError:
                pass
            except RuntimeError as error:
                if not self.is_told(error):
                    raise
        self.model.reset_iter_state()
        self.oracle.forget_pending()
        self.zero(to_none=True)
        self.compare_gradients()

    def is_told(self, error: RuntimeError) -> bool:
        """Whether ``error`` quotes another rank, which was sooner to fail on purpose.

        It is a ``PeerError``, or has a note where this rank stood in a collective of torch's.
        """
        said = "\n".join((str(error), *getattr(error, "__notes__", ())))
        quoted = re.findall(r"\brank (\d+) failed ", said)
        others = set(range(self.case.mesh.ranks)) - {dist.get_rank()}
        return bool(quoted) and {int(rank) for rank in quoted} <= others

    # Comparing --------------------------------------------------------------------------------

    def compare_outputs(self, found: Tensor, expected: Tensor) -> None:
        oracle = self.oracle
        if found.dtype != expected.dtype:
            self.differ(f"outputs are {found.dtype} instead of {expected.dtype}")
        largest = float(expected.double().abs().max()) if expected.numel() else 0.0
        slack = oracle.roundings * oracle.eps * max(largest, 1.0)
        self.compare("outputs", found, expected, slack)

    def compare_gradients(self) -> None:
        """Whether every gradient is what it should be, ``None`` where it should be ``None``."""
        oracle = self.oracle
        found: dict[str, Tensor] = {}
        for name, parameter in self.sharded.parameters.items():
            gradient = parameter.grad
            if (gradient is None) != (name not in oracle.grads):
                theirs = "a tensor" if name in oracle.grads else "None"
                self.differ(
                    f"grad of {name} is {'None' if gradient is None else 'a tensor'} "
                    f"instead of {theirs}"
                )
            if gradient is None or name not in oracle.grads:
                continue
            if gradient.dtype != parameter.dtype:
                self.differ(f"grad of {name} is {gradient.dtype}, not {parameter.dtype}")
            whole = full(gradient)
            found[name] = whole
            slack = oracle.slack[name] + 2 * torch.finfo(parameter.dtype).eps * float(
                oracle.grads[name].abs().max() if whole.numel() else 0.0
            )
            self.compare(f"grad of {name}", whole, oracle.grads[name], slack)
        self.agree()
        oracle.adopt(found)

    def compare_parameters(self, *, exact: bool) -> None:
        """What the optimizer holds. Not the state dict: taking one may reshard units."""
        for name, value in self.oracle.values.items():
            whole = full(self.sharded.parameters[name].detach())
            slack = self.oracle.value_slack(name, exact=exact)
            self.compare(f"parameter {name}", whole, value.detach(), slack)
            if whole.shape == value.shape:
                self.oracle.take(name, whole)
        self.agree()

    def compare_state(self) -> None:
        """What a checkpoint would hold."""
        state = self.model.state_dict()
        expected = self.oracle.model.state_dict()
        if list(state) != list(expected):
            self.differ(f"the state dict has {list(state)}, not {list(expected)}")
        for name in (name for name in expected if name in state):
            self.compare(f"state {name}", full(state[name].detach()), expected[name], 0.0)
        self.agree()

    def compare(self, what: str, found: Tensor, expected: Tensor, slack: float) -> None:
        if found.shape != expected.shape:
            self.differ(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
            return
        if not found.numel():
            return
        off = float((found.double() - expected.double()).abs().max())
        if not off <= slack:  # also if it is not a number
            self.differ(f"{what}: off by {off:.3g}, {slack:.3g} allowed")

    def differ(self, text: str) -> None:
        """Note a difference; :meth:`agree` raises it on all ranks at once."""
        self.differences.append(text)

    def agree(self) -> None:
        found = self.differences
        flag = torch.tensor(float(bool(found)))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.everyone)
        if flag.item():
            text = "; ".join(found[:4]) or "(on another rank)"
            raise DifferenceError(f"{self.where}: {text}")


def full(value: Tensor) -> Tensor:
    """The whole tensor, whatever its form."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Where a case writes checkpoints and shards."""
    return tempfile.TemporaryDirectory(prefix="polyshard-fuzz-")
