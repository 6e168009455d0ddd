"""The order in which hooks are asked and parts are used, as a picture for the page of hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

WIDTH, MARGIN, GAP, HEIGHT, ROW = 1000, 14, 26, 40, 62
"""Pixels; a row has a box of each of ``IN_A_ROW`` names."""
IN_A_ROW = 3

PLAN = (
    "polyshard_prepare_model",
    "pre_flatten_transform",
    "polyshard_parameter_facts",
    "polyshard_gradient_landing",
    "polyshard_sharding_constraint",
    "polyshard_shard_storage",
    "polyshard_collectives_backend",
    "polyshard_{gather,reduce}_codec",
    "post_unflatten_transform",
)
STEP = (
    "storage.fetch",
    "gather codec.encode",
    "transport",
    "gather codec.decode",
    "forward, backward",
    "reduce codec",
    "transport",
    "storage.place_gradient",
)


def picture() -> str:
    """Two chains of boxes, read like text: what ``fully_shard`` asks once, what each step runs."""
    first = list(_chain("once, in fully_shard: hooks", PLAN, MARGIN))
    below = MARGIN + 34 + ROW * _rows(PLAN) + 8
    second = list(_chain("every step: plain objects", STEP, below))
    height = below + 34 + ROW * _rows(STEP)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="15">',
        "<title>Hooks are asked once, in order; a step runs what they returned</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fbfaf7"/>',
    ]
    return "\n".join([*head, *first, *second, "</svg>\n"])


def _rows(names: Sequence[str]) -> int:
    return -(-len(names) // IN_A_ROW)


def _chain(title: str, names: Sequence[str], top: int) -> Iterator[str]:
    yield f'<text x="{MARGIN}" y="{top + 20}" font-weight="600">{escape(title)}</text>'
    width = (WIDTH - 2 * MARGIN - GAP * IN_A_ROW) / IN_A_ROW
    for number, name in enumerate(names):
        row, column = divmod(number, IN_A_ROW)
        left, upper = MARGIN + column * (width + GAP), top + 34 + row * ROW
        yield (
            f'<rect x="{left:.0f}" y="{upper}" width="{width:.0f}" height="{HEIGHT}" rx="6" '
            'fill="#fff" stroke="#5b6b7a"/>'
        )
        yield f'<text x="{left + 10:.0f}" y="{upper + 26}">{escape(name)}</text>'
        if number + 1 < len(names):
            yield f'<text x="{left + width + 5:.0f}" y="{upper + 26}" fill="#5b6b7a">→</text>'
