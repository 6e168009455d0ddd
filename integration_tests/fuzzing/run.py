"""One case on real ranks. What is compared is gathered on all of them, so all find the same."""

from __future__ import annotations

import functools
import tempfile
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fuzzing.build import (
    OPTIMIZERS,
    PLACEMENTS,
    Mlp,
    Table,
    batch,
    build,
    loss_of,
    policy_of,
    unit_calls,
)
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
from fuzzing.oracle import DeliberateError, Oracle, Rounded, failing
from fuzzing.saving import WAYS, WRITES


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
    from polyshard.errors import PolyshardError

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
        self.saves = 0
        self.mesh = mesh
        self.offload: Any = None
        self.quantized: Any = None
        self.model: Any = self._sharded()
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self.optimizer = self._new_optimizer()
        self.oracle = Oracle(case, self._rounded())
        self.stopped = False

    # Building ---------------------------------------------------------------------------------

    def _sharded(self) -> nn.Module:
        from polyshard import fully_shard

        case = self.case
        source = build(case)
        if case.meta:
            with torch.device("meta"):
                model = build(case)
        else:
            model = source
        plugins = self._plugins(model)
        data = self.mesh[case.mesh.names[:-1]] if case.mesh.tensor else self.mesh
        calls = list(unit_calls(case, model))
        for modules, unit in calls:
            fully_shard(
                modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
                mesh=data,
                reshard_after_forward=unit.reshard,
                shard_placement_fn=PLACEMENTS[unit.placement],
                mp_policy=policy_of(unit.policy),
                plugins=plugins,
            )
        self.units = [module for modules, _ in calls for module in modules]
        if case.meta:
            self._materialize(model, source)
        return model

    def _materialize(self, model: nn.Module, source: nn.Module) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model.to_empty(device="cpu")
        buffers = dict(source.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, source.state_dict(), options=options)

    def _plugins(self, model: nn.Module) -> list[object]:
        case = self.case
        plugins: list[object] = []
        if case.mesh.tensor:
            plugins.append(self._tensor_parallel(model))
        if case.quantized is not None:
            self.quantized = _quantized(case)
            plugins.append(self.quantized)
        if case.offload is not None:
            from polyshard_offload import DiskSettings, Offload

            chosen = case.offload
            self.offload = Offload(
                params=chosen.params,  # type: ignore[arg-type]
                grads=chosen.grads,  # type: ignore[arg-type]
                optimizer=chosen.optimizer,  # type: ignore[arg-type]
                fraction=chosen.fraction,
                prefetch=chosen.prefetch,
                chunk_bytes=chosen.chunk_bytes,
                disk=DiskSettings(path=self.folder, checksums=chosen.checksums),
            )
            plugins.append(self.offload)
        return plugins

    def _tensor_parallel(self, model: nn.Module) -> object:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from polyshard_tensor_parallel import TensorParallel

        tensor = self.case.mesh.tensor
        styles: dict[str, Any] = {}
        for name, module in model.named_modules():
            if isinstance(module, Mlp) and module.up.out_features % tensor == 0:
                styles[f"{name}.up"] = ColwiseParallel()
                styles[f"{name}.down"] = RowwiseParallel()
            if isinstance(module, Table) and module.table.num_embeddings % tensor == 0:
                styles[f"{name}.table"] = RowwiseParallel(input_layouts=Replicate())
        plugin = TensorParallel(styles, mesh=self.mesh["tensor"])
        plugin.apply(model)
        return plugin

    def _new_optimizer(self) -> torch.optim.Optimizer | None:
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if not trained:
            return None
        optimizer = OPTIMIZERS[self.case.optimizer](trained)
        return optimizer if self.offload is None else self.offload.wrap(optimizer)

    def _rounded(self) -> dict[str, Rounded]:
        """How each parameter travels, as the plugin says before the first step."""
        if self.quantized is None:
            return {}
        from polyshard import describe

        describe(self.model)
        found: dict[str, Rounded] = {}
        for group in self.quantized.report().groups:
            for transfer, gathers in ((group.gather, True), (group.reduce, False)):
                for parameter in transfer.parameters if transfer is not None else ():
                    if parameter.excluded is None:
                        how = found.setdefault(parameter.fqn, self._cut(parameter.fqn))
                        if gathers:
                            how.weights = transfer.format
                        else:
                            how.gradients = self.case.quantized.gradients[0]  # type: ignore[union-attr,index]
        return found

    def _cut(self, name: str) -> Rounded:
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        axes = list(parameter.placements)
        tensor = axes.pop() if self.case.mesh.tensor else None
        shard: Any = axes[-1]
        dims = {"shard_dim": shard.dim} if not shard.is_replicate() else {}
        cut: Any = tensor
        return Rounded(**dims, tensor_dim=getattr(cut, "dim", None))

    # Script -----------------------------------------------------------------------------------

    def script(self) -> None:
        """Run all actions, comparing after each."""
        self.compare_parameters(exact=True)
        script = self.case.script
        for number, action in enumerate(script):
            self.where = f"action {number}, {action}"
            trains_on = any(isinstance(a, Train) for a in script[number + 1 : number + 2])
            self.act(action if trains_on else _resharding(action))
        self.where = "the end"
        self.compare_parameters(exact=True)

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
                self.model.zero_grad(set_to_none=action.to_none)
                self.oracle.zero(to_none=action.to_none)
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
        if not action.keep:
            self.compare_gradients()

    def evaluate(self, action: Evaluate) -> None:
        self.model.train(action.training)
        with torch.inference_mode() if action.inference else torch.no_grad():
            out = self.model(batch(self.case, self.micro, self.data_rank))[0].clone()
        self.model.train()
        self.compare_outputs(out, self.oracle.evaluate(self.micro, self.data_rank))
        self.agree()

    def clip(self, action: Clip) -> None:
        from polyshard import clip_grad_norm_

        clip = clip_grad_norm_
        trained = [p for p in self.parameters.values() if p.requires_grad]
        found = clip(trained, action.max_norm, action.norm_type)
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
        if self.optimizer is not None:
            self.optimizer.step()
        self.compare_parameters(exact=False)

    def save(self, action: Save) -> None:
        self.saves += 1
        folder = self.folder / f"checkpoint{self.saves}"
        load = WAYS[action.how](self.model, folder, self.everyone)
        with torch.no_grad():
            for parameter in self.parameters.values():
                if parameter.is_floating_point():
                    parameter.add_(1.0)
        load()
        if action.how == "assign":
            self.parameters = dict(self.model.named_parameters())
            self.model.zero_grad()
            self.oracle.zero(to_none=True)
            self.optimizer, self.oracle.optimizer = (
                self._new_optimizer(),
                self.oracle.new_optimizer(),
            )
        self.compare_parameters(exact=True)

    def write(self, action: Write) -> None:
        floats = [p for p in self.parameters.values() if p.is_floating_point()]
        if floats:
            with torch.no_grad():
                WRITES[action.how](floats)
        self.oracle.halve()
        self.compare_parameters(exact=True)

    def by_hand(self, action: ByHand) -> None:
        unit: Any = self.units[action.unit % len(self.units)]
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
        self.model.reset_iter_state()
        self.model.zero_grad()
        self.oracle.forget_pending()
        self.oracle.zero(to_none=True)
        self.compare_gradients()

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
        for name, parameter in self.parameters.items():
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
        state = self.model.state_dict()
        for name, value in self.oracle.values.items():
            if name not in state:
                self.differ(f"{name} is not in the state dict")
                continue
            whole = full(state[name].detach())
            slack = self.oracle.value_slack(name, exact=exact)
            self.compare(f"parameter {name}", whole, value.detach(), slack)
            if whole.shape == value.shape:
                self.oracle.take(name, whole)
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
        self.differences = [*getattr(self, "differences", []), text]

    def agree(self) -> None:
        found: list[str] = getattr(self, "differences", [])
        flag = torch.tensor(float(bool(found)))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.everyone)
        if flag.item():
            text = "; ".join(found[:4]) or "(on another rank)"
            raise DifferenceError(f"{self.where}: {text}")


def _resharding(action: Action) -> Action:
    """The same, but resharding after backward: nothing but a micro-batch may come before that."""
    return replace(action, keep=False) if isinstance(action, Train) else action


def _quantized(case: Case) -> Any:
    from polyshard_quantized import Exclusions, Float8Block, Int4Block, Int8Block, QuantizedComm

    chosen = case.quantized
    assert chosen is not None
    formats = {"int8": Int8Block, "float8": Float8Block, "int4": Int4Block}

    def made(form: tuple[str, int] | None) -> Any:
        return None if form is None else formats[form[0]](form[1])

    return QuantizedComm(
        weights=made(chosen.weights),
        gradients=made(chosen.gradients),
        exclude=Exclusions(min_ndim=chosen.min_ndim, min_numel=chosen.min_numel),
        rounding="stochastic" if chosen.stochastic else "nearest",
        hierarchical=chosen.hierarchical,
    )


def full(value: Tensor) -> Tensor:
    """The whole tensor, whatever its form."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Where a case writes checkpoints and shards."""
    return tempfile.TemporaryDirectory(prefix="polyshard-fuzz-")
