"""The tables of docs/reference/combinations.md, from the table of combinations."""

from __future__ import annotations

from pathlib import Path

from composition_table import (
    CELLS,
    DTYPES,
    FEATURES,
    FORMAT_TOLERANCES,
    REFUSALS,
    ROUNDING_TOLERANCE,
    STACKS,
    THOROUGH,
    Cell,
    Layout,
    Stack,
    layouts_of,
)
from write_pages import page_with, table

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "combinations.md"


def _agreements() -> str:
    names = {"int8": "two steps of int8", "bf16": "four of bf16"}
    steps = ", ".join(f"{what} ({FORMAT_TOLERANCES[key]:.4f})" for key, what in names.items())
    return (
        "- `=`: bitwise equal.\n"
        f"- `≈`: within {ROUNDING_TOLERANCE:.0e} of every tensor's 2-norm (fp32 sums in another "
        f"order).\n- `~`: as `≈`, but a last bit may change a rounding: within {steps}, or both."
    )


def _left_out() -> str:
    return (
        f"Of {len(CELLS)} cells, CI leaves out {sum(cell.is_thorough for cell in CELLS)}: what is "
        f"compiled with plugins, and in bf16 {', '.join(THOROUGH)}."
    )


def _cells() -> str:
    alike: dict[tuple[str, ...], dict[Stack, list[str]]] = {}
    for stack in STACKS:
        for layout in layouts_of(stack):
            for dtype in DTYPES:
                mesh, *found = _line(stack, layout, dtype)
                alike.setdefault((mesh, *found), {}).setdefault(stack, []).append(dtype)
    lines = []
    for (mesh, *found), stacks in alike.items():
        by_dtypes: dict[str, list[str]] = {}
        for stack, dtypes in stacks.items():
            by_dtypes.setdefault(", ".join(dtypes), []).append(" + ".join(stack) or "none")
        lines += [["; ".join(names), mesh, text, *found] for text, names in by_dtypes.items()]
    return table(["plugins", "mesh", "compute", *FEATURES], lines)


def _line(stack: Stack, layout: Layout, dtype: str) -> list[str]:
    cells = [Cell(stack, layout, dtype, feature) for feature in FEATURES]
    return [f"{layout.name} ({layout.sizes})", *(f"`{cell.agreement.value}`" for cell in cells)]


def _refusals() -> str:
    rows = [
        [refusal.what, _plugins(refusal.stack), f"`{refusal.error}`", f"`{refusal.words}`"]
        for refusal in REFUSALS
    ]
    return table(["combination", "plugins", "error", "text"], rows)


def _plugins(stack: Stack) -> str:
    return ", ".join(stack) or "none"


def files() -> dict[Path, str]:
    """The page."""
    training = "\n".join(f"- **{name}**: {text}" for name, text in FEATURES.items())
    return page_with(
        PAGE,
        agreements=_agreements(),
        training=training,
        cells=f"{_cells()}\n{_left_out()}",
        refused=_refusals(),
    )
