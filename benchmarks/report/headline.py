"""The picture at the top of the README: step time against FSDP2's, in four rows.

    python -m benchmarks.report.headline      writes docs/assets/headline.svg

Drawn as text, so that it follows the results, and readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.result import RESULTS, ROOT, Result, read_all
from benchmarks.step.rows import STEP

PICTURE = ROOT / "docs" / "assets" / "headline.svg"
ROWS = ("wide-2", "wide-bf16", "narrow-2", "compute-2")
WIDTH, LABEL, BAR, ROW = 720, 210, 430, 44
"""Pixels: of the picture, of what a row says, of FSDP2's bar, and of a row's height."""
STYLE = """\
<style>
.page { fill: #fbfaf7 } text { fill: #1c2a33 } .quiet { fill: #4a5a66 }
.ours { fill: #1f6f8b } .theirs { fill: #c9ced3 }
@media (prefers-color-scheme: dark) {
.page { fill: #161b20 } text { fill: #e6edf3 } .quiet { fill: #a9b6c0 }
.ours { fill: #4fb3d1 } .theirs { fill: #47525c }
}
</style>"""


def headline(results: Mapping[str, Result]) -> str:
    """The picture as SVG: for each row polyshard's bar over FSDP2's, whose length is 1."""
    shown = [results[name] for name in ROWS]
    height = 78 + ROW * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{_said(shown)}</title>",
        STYLE,
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        '<text x="16" y="28" font-weight="600">Time of a training step, FSDP2 = 1</text>',
    ]
    for number, result in enumerate(shown):
        parts.extend(_row(result, 46 + ROW * number))
    notes = "gloo on one 2-core machine; medians, both engines in turn in one run"
    parts.append(f'<text class="quiet" x="16" y="{height - 14}" font-size="11">{notes}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _row(result: Result, top: int) -> Iterator[str]:
    ratio, case = result.found["ratios"][STEP], result.found["case"]
    label = f"width {case['width']}, {case['tokens']} tokens, {_dtype(case)}"
    yield f'<text x="16" y="{top + 20}">{label}</text>'
    yield f'<rect class="theirs" x="{LABEL}" y="{top + 17}" width="{BAR}" height="10" rx="2"/>'
    yield (
        f'<rect class="ours" x="{LABEL}" y="{top + 5}" width="{BAR * ratio:.0f}" height="14" '
        'rx="2"/>'
    )
    yield (
        f'<text x="{LABEL + BAR * ratio + 8:.0f}" y="{top + 14}" font-weight="600">'
        f"{ratio:.2f}</text>"
    )
    yield f'<text class="quiet" x="{LABEL + BAR + 8}" y="{top + 27}" font-size="11">FSDP2</text>'


def _said(shown: list[Result]) -> str:
    ratios = ", ".join(f"{result.found['ratios'][STEP]:.2f}" for result in shown)
    return f"Step time of polyshard as a part of FSDP2's: {ratios}"


def _dtype(case: Mapping[str, object]) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}[str(case["dtype"])]


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(headline(read_all(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
