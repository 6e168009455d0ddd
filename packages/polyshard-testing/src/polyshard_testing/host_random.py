"""Generators of the CPU give values to tensors of any device: the bits of a run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

DRAWS = frozenset((
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
    "normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "exponential_", "trunc_normal_",
    "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "orthogonal_",
))  # fmt: skip
"""Names of functions that draw, of ``torch``, its tensors and ``torch.nn.init``."""


class HostRandom(TorchFunctionMode):
    """Draws on the CPU, with a generator that is given or its own, and copies what it drew.

    Devices other than the CPU refuse the former, and their own generators draw other values.
    """

    @override
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        generator = given.get("generator")
        name = getattr(function, "__name__", "")
        draws = name in DRAWS if generator is None else generator.device.type == "cpu"
        if not draws or "out" in given:
            return function(*args, **given)
        if "tensor" in given:  # as functions of ``torch.nn.init`` are called
            args = (given.pop("tensor"), *args)
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if first.is_meta or (generator is None and isinstance(first, DTensor)):
                return function(*args, **given)
            drawn = function(first.detach().cpu(), *args[1:], **given)
            if not name.endswith("_"):
                return drawn.to(first.device)
            with torch.no_grad():
                return first.copy_(drawn)
        device = torch.device(given.pop("device", None) or torch.get_default_device())
        if device.type == "meta":
            return function(*args, device=device, **given)
        requires_grad = given.pop("requires_grad", False)
        drawn = function(*args, device="cpu", **given)
        return drawn.to(device).requires_grad_(requires_grad)
