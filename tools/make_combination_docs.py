"""Write docs/reference/combinations.md from the table of combinations.

Usage: python tools/make_combination_docs.py [--check]  (--check: only say whether it is current)
"""

from __future__ import annotations

from pathlib import Path

from composition_table import (
    CELLS,
    DTYPES,
    FEATURES,
    FORMAT_TOLERANCES,
    PLUGINS,
    REFUSALS,
    ROUNDING_TOLERANCE,
    STACKS,
    THOROUGH,
    Cell,
    Layout,
    Stack,
    layouts_of,
)
from generated import table, write_or_check

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "combinations.md"
HEAD = f"""# Combinations

Generated from `tools/composition_table.py` by `tools/make_combination_docs.py`; edit the table.

Every subset of the plugins of this repository, on every kind of mesh, in both compute dtypes,
trained in every way below: {len(CELLS)} cells. Each is a test of its own (`integration_tests`)
on real ranks, with the same training in one process as its oracle. `nox -s tests -- --thorough`
runs each cell once, in an environment that holds exactly the plugins of its stack; CI leaves out
the {sum(cell.is_thorough for cell in CELLS)} in bf16 under {", ".join(THOROUGH)}.

The model is a transformer of two blocks whose rows leave a remainder over the ranks; with replicas
the head is tied to the embedding. Every parameter, moment of AdamW and loss is compared. What a
stack does to values on purpose is done by the oracle too: bf16 copies of fp32 masters, and the
round trip through `Int8Block` of what ranks send each other, parameters and gradients.

- `=` the same bits as in one process.
- `≈` within {ROUNDING_TOLERANCE:.0e} of every tensor's 2-norm: sums of fp32 in another order.
- `~` as `≈`, but a value that differs in its last bit may be rounded to the next one of a format
  afterwards: within two steps of int8 ({FORMAT_TOLERANCES["int8"]:.4f}; parameters and gradients),
  four of bf16 ({FORMAT_TOLERANCES["bf16"]:.4f}; two blocks, there and back), or both together, of
  the 2-norm of every moment and of every change of a parameter.

"""
TRAINING = "\n".join(f"- **{name}**: {text}" for name, text in FEATURES.items())


def page() -> str:
    """The whole page."""
    return f"{HEAD}{TRAINING}\n\n{_cells()}\n{_refusals()}"


def _cells() -> str:
    lines = [
        _line(stack, layout, dtype)
        for stack in STACKS
        for layout in layouts_of(stack)
        for dtype in DTYPES
    ]
    return table(["plugins", "mesh", "compute", *FEATURES], lines)


def _line(stack: Stack, layout: Layout, dtype: str) -> list[str]:
    cells = [Cell(stack, layout, dtype, feature) for feature in FEATURES]
    mesh = f"{layout.name} ({layout.sizes})"
    return [_plugins(stack), mesh, dtype, *(f"`{cell.agreement.value}`" for cell in cells)]


def _refusals() -> str:
    rows = [
        [refusal.what, _plugins(refusal.stack), f"`{refusal.error}`", f"`{refusal.words}`"]
        for refusal in REFUSALS
    ]
    return (
        "## What is refused\n\n"
        f"No subset of {', '.join(PLUGINS)} is. What is, on every rank alike:\n\n"
        f"{table(['combination', 'plugins', 'error', 'which says'], rows)}"
    )


def _plugins(stack: Stack) -> str:
    return ", ".join(stack) or "none"


def files() -> dict[Path, str]:
    """The page."""
    return {PAGE: page()}


if __name__ == "__main__":
    write_or_check(files(), "make_combination_docs.py")
