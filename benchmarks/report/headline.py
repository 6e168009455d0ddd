"""The picture at the top of the README: step time against FSDP2's, in four rows.

    python -m benchmarks --publish      writes docs/assets/headline.svg

Drawn as text, so that it follows the results, and readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.result import ROOT, Result
from benchmarks.step.time import STEP

PICTURE = ROOT / "docs" / "assets" / "headline.svg"
ROWS = ("wide-2", "wide-bf16", "narrow-2", "compute-2")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
BAR, ROW = 430, 44
"""Pixels: the length of FSDP2's bar, and the height of a row."""
PAGE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" \
font-family="system-ui, sans-serif" font-size="13">
<title>Step time of polyshard as a part of FSDP2's: {ratios}</title>
<style>
.page {{ fill: #fbfaf7 }} text {{ fill: #1c2a33 }} .quiet {{ fill: #4a5a66 }}
.ours {{ fill: #1f6f8b }} .theirs {{ fill: #c9ced3 }}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #161b20 }} text {{ fill: #e6edf3 }} .quiet {{ fill: #a9b6c0 }}
.ours {{ fill: #4fb3d1 }} .theirs {{ fill: #47525c }}
}}
</style>
<rect class="page" width="720" height="{height}" rx="8"/>
<text x="16" y="28" font-weight="600">Time of a training step, FSDP2 = 1</text>
{rows}
<text class="quiet" x="16" y="{bottom}" font-size="11">\
gloo on one 2-core machine; medians, both engines in turn in one run</text>
</svg>
"""
BARS = """\
<text x="16" y="{0}">width {width}, {tokens} tokens, {dtype}</text>
<rect class="theirs" x="210" y="{1}" width="430" height="10" rx="2"/>
<rect class="ours" x="210" y="{2}" width="{length:.0f}" height="14" rx="2"/>
<text x="{end:.0f}" y="{3}" font-weight="600">{ratio:.2f}</text>
<text class="quiet" x="648" y="{4}" font-size="11">FSDP2</text>"""


def headline(results: Mapping[str, Result]) -> str:
    """The picture as SVG: for each row polyshard's bar over FSDP2's, whose length is 1."""
    shown = [results[name].found for name in ROWS]
    rows = []
    for number, found in enumerate(shown):
        case, ratio = found["case"], found["ratios"][STEP]
        places = (46 + ROW * number + below for below in (20, 17, 5, 14, 27))
        label = {**case, "dtype": DTYPES[case["dtype"]]}
        length = BAR * ratio
        rows.append(BARS.format(*places, **label, ratio=ratio, length=length, end=218 + length))
    ratios = ", ".join(f"{found['ratios'][STEP]:.2f}" for found in shown)
    height = 78 + ROW * len(shown)
    return PAGE.format(height=height, bottom=height - 14, ratios=ratios, rows="\n".join(rows))
