"""Generators of the CPU give values to tensors of any device: the bits of a run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class HostRandom(TorchFunctionMode):
    """Draws on the CPU where a call is given a generator there, and copies what it drew.

    Devices other than the CPU refuse such a generator, and their own draws other values.
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
        if generator is None or generator.device.type != "cpu":
            return function(*args, **given)
        if "tensor" in given:  # as functions of ``torch.nn.init`` are called
            args = (given.pop("tensor"), *args)
        first = args[0] if args else None
        if isinstance(first, Tensor):
            drawn = function(first.detach().cpu(), *args[1:], **given)
            if not function.__name__.endswith("_"):
                return drawn.to(first.device)
            with torch.no_grad():
                return first.copy_(drawn)
        device = given.pop("device", None) or torch.get_default_device()
        requires_grad = given.pop("requires_grad", False)
        drawn = function(*args, device="cpu", **given)
        return drawn.to(device).requires_grad_(requires_grad)
