"""What one process computes, and how far from it sharded training may be.

[Note: tolerances]
The oracle runs every data rank's micro-batch with the same operations, in the same dtypes, on the
parameters as they were compared last, so differences never add up over steps. What is left:

- Sums over ranks and micro-batches are rounded to the reduce dtype: a few ``eps`` of the coarsest
  dtype in play, times the sum of the magnitudes added (``scale``), not of the result, which may
  cancel.
- Matrix products depend in their last bits on where operands lie in memory: ``eps`` of the
  dtype of compute, amplified by the few bounded layers in front.
- Tensor parallelism rounds partial sums on every rank, in all layers: more of the same.
- A quantized reduction is off by at most what its format states of the largest value each rank
  sends, once a hop. Quantized weights are no difference: the oracle computes with what the format
  makes of them.
- After a step of the optimizer, taken on equal gradients, only the order of fused multiplications
  differs: a few ``eps`` of the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fuzzing.build import OPTIMIZERS, Flow, batch, build, dtype, loss_of, unit_calls
from fuzzing.case import Case, Policy, Train, units

ROUNDINGS = 16
"""Roundings between an input and a gradient that may differ; products amplify each a little."""
TENSOR_PARALLEL_ROUNDINGS = 256
"""Sums of 2048 products: the oracle itself was 143 off what float64 gives (case 1651 of seed 1)."""


@dataclass
class Rounded:
    """How a parameter travels: formats by transfer, and the dims that cut it."""

    weights: Any = None
    gradients: Any = None
    shard_dim: int = 0
    tensor_dim: int | None = None


class Oracle:
    """A whole model in one process, and the gradients all data ranks have made so far."""

    def __init__(self, case: Case, rounded: Mapping[str, Rounded]) -> None:
        self.case = case
        self.rounded = rounded
        self.model = build(case)
        self.values = dict(self.model.named_parameters())
        self.optimizer = self.new_optimizer()
        self.compute = build(case)
        self.policies = _hooked(case, self.compute)
        self.eps = self._coarsest()
        self.pending: dict[str, Tensor] = {}
        self.pending_scale: dict[str, float] = {}
        self.grads: dict[str, Tensor] = {}
        self.slack: dict[str, float] = {}

    def new_optimizer(self) -> torch.optim.Optimizer | None:
        """Without state; ``None`` if there is nothing to train."""
        trained = [p for p in self.values.values() if p.requires_grad]
        return OPTIMIZERS[self.case.optimizer](trained) if trained else None

    def _coarsest(self) -> float:
        names = {
            n
            for u in units(self.case.tree)
            for n in (u.policy.param, u.policy.reduce, u.policy.output)
            if n is not None
        }
        kinds = {dtype(n) for n in names}
        kinds |= {p.dtype for p in self.values.values() if p.is_floating_point()}
        return max((torch.finfo(kind).eps for kind in kinds), default=1e-7)

    @property
    def roundings(self) -> int:
        """Between an input and what is compared."""
        return TENSOR_PARALLEL_ROUNDINGS if self.case.mesh.tensor > 1 else ROUNDINGS

    # Forward and backward ---------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute with the parameters as they are now."""
        for name, parameter in self.compute.named_parameters():
            value = self.values[name].detach()
            policy = self.policies.get(name, Policy())
            kind = dtype(policy.param) if policy.param else value.dtype
            if value.is_floating_point():
                value = self._travelled(name, value).to(kind)
            parameter.data = value.clone()
            parameter.grad = None

    def _travelled(self, name: str, value: Tensor) -> Tensor:
        how = self.rounded.get(name, Rounded())
        if how.weights is None:
            return value
        from polyshard_quantized import round_trip

        pieces = [value]
        if how.tensor_dim is not None:
            pieces = list(value.chunk(self.case.mesh.tensor, how.tensor_dim))
        dim = how.shard_dim
        made = [round_trip(piece.float().contiguous(), how.weights, dim=dim) for piece in pieces]
        return torch.cat(made, how.tensor_dim or 0) if len(made) > 1 else made[0]

    def evaluate(self, micro: int, data_rank: int) -> Tensor:
        """Outputs on one rank."""
        self.refresh()
        with torch.no_grad():
            out: Flow = self.compute(batch(self.case, micro, data_rank))
        return out[0]

    def train(self, action: Train, micro: int, data_rank: int) -> list[Tensor]:
        """Add all ranks' gradients; the outputs of one rank."""
        self.refresh()
        mine: list[Tensor] = []
        ran = False
        for rank in range(self.case.mesh.data):
            flows = [
                self.compute(batch(self.case, micro + i, rank)) for i in range(action.forwards)
            ]
            losses = [loss_of(flow, micro + i) for i, flow in enumerate(flows)]
            losses = [loss for loss in losses if loss.requires_grad]
            if action.joint and losses:
                losses = [torch.stack(losses).sum()]
            for loss in losses:  # backwards one by one are reduced, and rounded, one by one
                loss.backward()
                self._collect()
                ran = True
            if rank == data_rank:
                mine = [flow[0].detach() for flow in flows]
        if action.sync and ran:
            self._reduce()
        return mine

    def _collect(self) -> None:
        for name, parameter in self.compute.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.double() / self.case.mesh.data
            parameter.grad = None
            if name in self.pending:
                gradient = gradient + self.pending[name]
            self.pending[name] = gradient
            scale = float(gradient.abs().max()) if gradient.numel() else 0.0
            self.pending_scale[name] = self.pending_scale.get(name, 0.0) + scale

    def _reduce(self) -> None:
        for name, gradient in self.pending.items():
            scale = self.pending_scale[name]
            self.grads[name] = self.grads[name] + gradient if name in self.grads else gradient
            slack = self.roundings * self.eps * scale + 1e-9
            if self.eps >= torch.finfo(torch.float16).eps:
                slack += 1e-6  # values below fp16's smallest
            self.slack[name] = self.slack.get(name, 0.0) + slack + self._quantization(name, scale)
        self.forget_pending()

    def _quantization(self, name: str, scale: float) -> float:
        form = self.rounded.get(name, Rounded()).gradients
        if form is None:
            return 0.0
        assert self.case.quantized is not None
        hops = 2 if self.case.mesh.replicas > 1 else 1
        whole = 2 if self.case.quantized.stochastic else 1  # up or down, not to the nearest
        return scale * float(form.error_bound) * hops * whole * 1.1

    def forget_pending(self) -> None:
        """Drop what was not reduced."""
        self.pending, self.pending_scale = {}, {}

    def zero(self, *, to_none: bool) -> None:
        """``zero_grad``; what was not reduced stays."""
        self.grads = {} if to_none else {n: torch.zeros_like(g) for n, g in self.grads.items()}
        self.slack = dict.fromkeys(self.grads, 1e-30)

    def adopt(self, gradients: Mapping[str, Tensor]) -> None:
        """Continue with these gradients, which were compared."""
        # Copies: of a world of one, whole gradients are the very memory that optimizers write to.
        self.grads = {name: g.detach().clone().double() for name, g in gradients.items()}
        self.slack = {name: self.slack.get(name, 0.0) for name in gradients}

    def settle(self) -> None:
        """From here on only one more rounding separates gradients that were adopted."""
        self.slack = {
            name: _few_roundings(self.values[name].dtype, gradient)
            for name, gradient in self.grads.items()
        }

    # The rest of a step -----------------------------------------------------------------------

    def norm(self, norm_type: float) -> Tensor:
        """Of all gradients."""
        flat = [g.reshape(-1) for g in self.grads.values() if g.numel()]
        found: Tensor
        found = torch.linalg.vector_norm(torch.cat(flat or [torch.zeros(1)]).double(), norm_type)
        return found

    def scale_gradients(self, factor: float) -> None:
        """Clip."""
        self.grads = {name: gradient * factor for name, gradient in self.grads.items()}

    def step(self) -> None:
        """Step on the gradients as they are."""
        for name, parameter in self.values.items():
            gradient = self.grads.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        if self.optimizer is not None:
            self.optimizer.step()
        # SGD's foreach form with Nesterov momentum adds the momentum to the gradients themselves.
        self.adopt({name: self.values[name].grad for name in self.grads})  # type: ignore[misc]
        self.settle()

    @torch.no_grad()
    def halve(self) -> None:
        """What ``Write`` does."""
        for parameter in self.values.values():
            if parameter.is_floating_point():
                parameter.mul_(0.5)

    def value_slack(self, name: str, *, exact: bool) -> float:
        """How far a parameter may be from its value here."""
        value = self.values[name]
        if exact or not value.is_floating_point():
            return 0.0
        return 8 * torch.finfo(value.dtype).eps * max(1.0, _largest(value.detach()))

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        """Continue with a parameter that was compared."""
        self.values[name].copy_(value)


def _few_roundings(dtype: torch.dtype, value: Tensor) -> float:
    """Below its smallest normal number a dtype has steps of one size."""
    info = torch.finfo(dtype)
    return 4 * info.eps * max(_largest(value), info.smallest_normal)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _hooked(case: Case, model: nn.Module) -> dict[str, Policy]:
    """Cast as units do; the policy of every parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    policies: dict[str, Policy] = {}
    for modules, unit in unit_calls(case, model):
        for module in modules:
            for parameter in module.parameters():
                policies.setdefault(names[parameter], unit.policy)
            _cast(module, unit.policy)
    return policies


def _cast(module: nn.Module, policy: Policy) -> None:
    def before(module: nn.Module, args: Any) -> Any:
        return _floats_to(args, policy.param) if policy.cast_inputs and policy.param else args

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return _floats_to(out, policy.output) if policy.output else out

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _floats_to(tree: Any, name: str) -> Any:
    kind = dtype(name)
    return tree_map_only(Tensor, lambda t: t.to(kind) if t.is_floating_point() else t, tree)


@contextmanager
def failing(module: nn.Module, *, backward: bool) -> Iterator[None]:
    """Have ``module`` raise :class:`DeliberateError` once its children ran."""

    def raise_(*args: Any) -> None:
        raise DeliberateError("on purpose")

    def on_output(module: nn.Module, args: Any, out: Flow) -> None:
        if not backward:
            raise_()
        if out[0].requires_grad:
            out[0].register_hook(raise_)

    handle = module.register_forward_hook(on_output)
    try:
        yield
    finally:
        handle.remove()


class DeliberateError(RuntimeError):
    """Raised by a script, not by what is tested."""
