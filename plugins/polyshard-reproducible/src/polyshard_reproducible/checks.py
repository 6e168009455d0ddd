"""What breaks the promise though no group of the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from polyshard_optimizers.stepping.elementwise import ELEMENTWISE, is_known, known_against
from polyshard_optimizers.stepping.stepper import Stepper
from polyshard_reproducible.errors import ReproducibleError


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose results depend on where shards end.

    Every optimizer of a model is checked before it steps; call this to learn of it earlier. An
    unknown class says ``sees_shards = False`` (in the class, or on the object) if it computes the
    same for an element whatever shard that is in.

    Raises:
        ReproducibleError: for ``fused=True`` on the CPU; for classes that compute with whole
            tensors, or are not known.
    """
    for group in optimizer.param_groups:
        on_host = any(p.device.type == "cpu" for p in group["params"])
        if group.get("fused") and on_host:
            raise ReproducibleError(
                f"reproducible: {type(optimizer).__name__}(fused=True) on the CPU rounds the last "
                "elements of a shard, which fill no vector register, differently from all others, "
                "and where shards end depends on the number of ranks. Use foreach=True."
            )
    stepper = Stepper.of(optimizer)
    kind = type(optimizer) if stepper is None else stepper.kind
    says = getattr(optimizer, "sees_shards", None)
    if says is False or (stepper is not None and stepper.by_runs) or is_known(kind):
        return
    reason = known_against(kind)
    if reason is not None:
        raise ReproducibleError(
            f"reproducible: what {kind.__name__} makes of an element may depend on where shards "
            f"end, and so on the number of ranks: {reason}. Use {', '.join(ELEMENTWISE)}, or for "
            "whole matrices MatrixOptimizer(..., gradients='rows') of polyshard-optimizers."
        )
    raise ReproducibleError(
        f"reproducible: {kind.__module__}.{kind.__name__} is not among the optimizers known to be "
        f"elementwise ({', '.join(ELEMENTWISE)} of torch.optim), and where shards end depends on "
        "the number of ranks. If it computes each element from that element's own weight, gradient "
        "and state alone, say so: sees_shards = False in its class."
    )


def check_device(device: torch.device) -> None:
    """Refuse an accelerator that may choose kernels anew.

    Raises:
        ReproducibleError: unless torch's own switch is on.
    """
    if device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        raise ReproducibleError(
            "reproducible: kernels that are not deterministic may run on this device. Call "
            "torch.use_deterministic_algorithms(True) first, which refuses them."
        )


def check_plans(plans: Iterable[Any], tree: str) -> None:
    """Refuse parts that results go through and that may see where shards end, of any plugin.

    A plugin that says what it provides is refused earlier, by its name; a parameter's tensor class
    and a plugin that wraps another say nothing.

    Args:
        plans: ``polyshard.describe(model).groups``.
        tree: the name of the reduce codec that is ours; a group without a trainable parameter or
            without this plugin is not checked.

    Raises:
        ReproducibleError: naming the group and the part.
    """
    for plan in plans:
        parts = plan.roles.exclusive
        if parts["reduce codec"].split(" around ")[-1].partition("(")[0] != tree:
            continue  # not given the plugin: said elsewhere
        if plan.layout.owned:
            raise ReproducibleError(
                f"reproducible: gradients of group '{plan.name}' land whole on owners "
                f"({parts['gradient landing']}), which add them up in an order of their own. Have "
                "them land on shards, as MatrixOptimizer(..., gradients='rows') does, or leave "
                "out one of the two plugins."
            )
        wanted = {"gather codec": "native", "reduce codec": tree}
        for role, part in wanted.items():
            if parts[role].partition("(")[0] != part:
                raise ReproducibleError(
                    f"reproducible: the {role} of group '{plan.name}' is {parts[role]}, whose "
                    "results may depend on where shards end. Leave that out, or this plugin."
                )
