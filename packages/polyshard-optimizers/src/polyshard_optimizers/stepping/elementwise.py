"""Which optimizers compute each element from its own past alone.

[Note: elementwise]
Such an optimizer makes the same of an element whichever tensor it is part of: of a shard, of a part
of it, or of several in a row. Others look at a whole tensor (its norm, its rows and columns, all of
it as a matrix), and there is nothing in them that would fail where a part is given for a whole:
they compute something else. So an optimizer that is not known is refused.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from polyshard.errors import LifecycleError, SettingError

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Those of ``torch.optim``, by name."""

NOT_ELEMENTWISE = {
    "Adafactor": "it keeps a mean for each row and each column of a matrix, and scales each update "
    "by its root mean square",
    "LBFGS": "it computes with dot products of all parameters, and calls its closure repeatedly",
    "Muon": "it makes each update an orthogonal matrix, for which it needs the whole matrix",
    "SparseAdam": "it steps the elements that sparse gradients have, and sharded gradients are "
    "dense",
}
"""The others of ``torch.optim``, and why."""

OF_OTHERS = {
    "it computes with the norm or mean of each tensor": (
        "AdaLOMO",
        "Adam_mini",
        "AdamP",
        "LAMB",
        "LARS",
        "NovoGrad",
        "StableAdamW",
    ),
    "it keeps means of rows and columns": ("CAME", "Adafactor"),
    "it computes with whole matrices": ("APOLLO", "GaLore", "Muon", "Shampoo", "SOAP"),
    "it keeps state in blocks, which begin where a tensor does": (
        "Adam8bit",
        "AdamW8bit",
        "Lion8bit",
    ),
    "it computes with sums over all parameters": ("DAdaptAdam", "DAdaptSGD", "Prodigy"),
}
"""Well-known optimizers of other libraries that are not elementwise: names of classes, by reason.

A name says what a class most likely is, no more. Capitals and underscores do not matter, and a user
whose class has such a name by chance derives one with a name of its own.
"""


def check_takeable(optimizer: object, caller: str, error: type[Exception] | None = None) -> None:
    """Refuse what is no optimizer, and one whose ``step`` is no longer that of its class.

    Args:
        optimizer: what the user gave to ``caller``.
        caller: what is to make its steps, for messages.
        error: what to raise instead of the exceptions below.

    Raises:
        SettingError: for what is no optimizer.
        LifecycleError: when other code has replaced ``step`` of the object already.
    """
    if not isinstance(optimizer, Optimizer):
        raise (error or SettingError)(
            f"{caller} takes a torch.optim.Optimizer, got {type(optimizer).__name__}. Make the "
            f"optimizer from the sharded model's parameters, then call {caller}(optimizer)."
        )
    if "step" in optimizer.__dict__:
        raise (error or LifecycleError)(
            f"something replaced step() of this {type(optimizer).__name__} object, as learning "
            f"rate schedulers do. Call {caller} first and make the scheduler from its result."
        )


def reason_against(
    optimizer: Optimizer, kind: type[Optimizer], *, is_declared: bool = False
) -> str | None:
    """Why ``optimizer``, made of the class ``kind``, cannot be stepped in runs, if it cannot.

    ``is_declared``: the user says that an unknown class is elementwise.
    """
    known = known_against(kind)
    if known is not None:
        return (
            f"{kind.__name__} cannot be stepped in runs: {known}. Use it unchanged, if its step is "
            "correct on shards."
        )
    if not (is_declared or is_known(kind)):
        return (
            f"{kind.__module__}.{kind.__name__} is not among the optimizers known to be "
            f"elementwise ({', '.join(ELEMENTWISE)} of torch.optim). If it computes each element "
            "of a parameter from that element's own weight, gradient and state alone, say so: "
            "flat(optimizer, elementwise=True)."
        )
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        return (
            f"{kind.__name__}(differentiable=True) cannot be stepped in runs: autograd follows "
            "parameters, and runs are tensors of their own. Leave the optimizer as it is."
        )
    return None


def is_known(kind: type[Optimizer]) -> bool:
    """Whether ``kind`` is one of torch's own optimizers known to be elementwise."""
    return any(kind is getattr(optim, name, None) for name in ELEMENTWISE)


def known_against(kind: type[Optimizer]) -> str | None:
    """Why ``kind`` is not elementwise, where that is known: in words that follow its name."""
    for name, reason in NOT_ELEMENTWISE.items():
        known = getattr(optim, name, None)
        if known is not None and issubclass(kind, known):
            return reason
    for reason, names in OF_OTHERS.items():
        if _plain_name(kind.__name__) in map(_plain_name, names):
            return f"{reason}, going by its name"
    return None


def _plain_name(name: str) -> str:
    return name.replace("_", "").casefold()
