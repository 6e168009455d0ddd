"""Parameters of attention that a plan forgot, where the result would be silently wrong.

[Note: heads]
Where a query projection is divided by columns, a rank has some of the heads, as a plain tensor.
Whatever else of the module meets these heads must be divided with them or know of them: keys and
values left whole are read by the wrong query heads, and any parameter applied to local heads (a
projection left whole, a norm of one head's width) gets a gradient from this rank's heads alone,
which nothing adds up over the ranks: it drifts apart. Shapes seldom show any of it, because modules
repeat keys and reshape with ``-1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from polyshard_tensor_parallel.plans.matching import matches
from polyshard_tensor_parallel.plans.plan import Heads, Plan

WIDTHS = (
    "head_dim",
    "head_width",
    "head_size",
    "attention_head_size",
    "dim_head",
    "d_head",
    "dim_per_head",
)
"""Attributes by which attention modules say how wide a head is."""
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""Attributes by which they say how many heads queries have."""

Assigned = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class _Attention:
    """A module whose heads a plan divides: elements of a head, and the children that make heads."""

    name: str
    module: nn.Module
    width: int
    divided: tuple[str, ...]

    def called(self, child: str) -> str:
        """The name of a child from the model down."""
        return f"{self.name}.{child}" if self.name else child


def left_out(
    plan: Plan, modules: Mapping[str, nn.Module], styles: Assigned, world_size: int
) -> Iterator[str]:
    """Problems with what ``plan`` leaves whole. See [Note: heads].

    Args:
        plan: with the attention modules that the user declared.
        modules: of the model, by name.
        styles: what the plan assigns, by name of the module.
        world_size: tensor-parallel ranks.
    """
    if world_size == 1:
        return
    declared = {n: h for h in plan.heads for n in matches(h.modules, modules)}
    whole = {n for pattern in plan.whole for n in matches(pattern, modules)}
    for name, module in modules.items():
        found = _attention(name, module, styles, declared.get(name))
        if found is None:
            continue
        known = set(declared[name].projections) if name in declared else set()
        yield from _undivided(found, known, world_size)
        for child, part in module.named_children():
            if not ({found.called(child)} & (styles.keys() | whole)):
                yield from _left_whole(found, child, part, world_size)
        yield from _own_parameters(found, whole)


def _attention(
    name: str, module: nn.Module, styles: Assigned, heads: Heads | None
) -> _Attention | None:
    divided = tuple(
        child
        for child, part in module.named_children()
        if isinstance(part, nn.Linear)
        and _gives_local_columns(styles.get(f"{name}.{child}" if name else child))
    )
    if not divided:
        return None
    width = _width(module, divided, heads)
    return None if width is None else _Attention(name, module, width, divided)


def _gives_local_columns(style: ParallelStyle | None) -> bool:
    """Whether a rank computes on with its own columns, as a plain tensor."""
    if not isinstance(style, ColwiseParallel) or not style.use_local_output:
        return False
    (layout,) = style.output_layouts
    return isinstance(layout, Shard) and layout.dim == -1


def _width(module: nn.Module, divided: tuple[str, ...], heads: Heads | None) -> int | None:
    """Elements of a head, if ``module`` is attention by what it says of itself."""
    names = (*((heads.width,) if heads is not None else ()), *WIDTHS)
    for name in names:
        width = getattr(module, name, None)
        if isinstance(width, int) and width > 0:
            return width
    for name in COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0:
            widest = max(_columns(module, child) for child in divided)
            return widest // count if widest % count == 0 else None
    return None


def _columns(module: nn.Module, child: str) -> int:
    linear = module.get_submodule(child)
    assert isinstance(linear, nn.Linear)
    return linear.out_features


def _undivided(at: _Attention, checked: set[str], world_size: int) -> Iterator[str]:
    """Projections whose heads do not divide; those of a declaration were checked with it."""
    for child in at.divided:
        columns = _columns(at.module, child)
        if child in checked or columns % at.width or columns // at.width % world_size == 0:
            continue
        yield (
            f"'{at.called(child)}.weight' makes {columns // at.width} heads of {at.width}, which "
            f"do not divide over {world_size} ranks: {_few(columns // at.width)}"
        )


def _left_whole(at: _Attention, child: str, part: nn.Module, world_size: int) -> Iterator[str]:
    name, by = at.called(child), f"'{at.called(at.divided[0])}'"
    if isinstance(part, nn.Linear):
        count, rest = divmod(part.out_features, at.width)
        if rest or not count:
            return
        if count % world_size == 0:
            fix = f"add '{name}' to the plan, with ColwiseParallel() if its outputs are heads too."
        else:
            fix = _few(count)
        yield (
            f"'{name}.weight' {tuple(part.weight.shape)} is not in the plan, but each rank has "
            f"only its share of the heads that {by} makes; its outputs would meet the wrong heads, "
            f"and its gradient would lack those of other ranks: {fix} If it has nothing to do "
            f"with heads, name it in Plan(whole=('{name}',))."
        )
        return
    for parameter, value in part.named_parameters(recurse=False):
        if tuple(value.shape) == (at.width,) and not _is_as_wide_as_the_model(at):
            yield _one_head(at, f"{name}.{parameter}", name)


def _own_parameters(at: _Attention, whole: set[str]) -> Iterator[str]:
    if at.name in whole or _is_as_wide_as_the_model(at):
        return
    for parameter, value in at.module.named_parameters(recurse=False):
        if value.ndim and value.shape[-1] == at.width:
            yield _one_head(at, at.called(parameter), at.name)


def _is_as_wide_as_the_model(at: _Attention) -> bool:
    """Whether a head is as wide as what attention reads: then width tells nothing."""
    linear = at.module.get_submodule(at.divided[0])
    assert isinstance(linear, nn.Linear)
    return linear.in_features == at.width


def _one_head(at: _Attention, parameter: str, module: str) -> str:
    return (
        f"'{parameter}' is as wide as a head ({at.width}) and not in the plan: applied to this "
        "rank's heads, its gradient would lack those of other ranks. Give its module a style that "
        "makes it a DTensor (SequenceParallel(sequence_dim=the dim of heads) for a norm); if it "
        f"has nothing to do with heads, name it in Plan(whole=('{module}',))."
    )


def _few(count: int) -> str:
    many = f"{count} heads" if count > 1 else "one head"
    return (
        f"{many} cannot be divided so. Use a number of ranks that divides them, leave the whole "
        "attention out of the plan, or give the projection a style of your own that makes its "
        "parameters replicated DTensors."
    )
