"""Which distributions there are, and which subsets of the plugins are tested with what."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

__all__ = [
    "ALONE",
    "FOLDERS",
    "NEUTRAL",
    "PACKAGES",
    "PLUGINS",
    "SUBSETS",
    "beside_others",
    "stack_of",
]

ROOT = Path(__file__).parents[1]

# A folder with a pyproject.toml is a distribution. It is found, never listed.
PACKAGES = [path.parent.name for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
PLUGINS = [path.parent.name for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
FOLDERS = [f"packages/{name}" for name in PACKAGES] + [f"plugins/{name}" for name in PLUGINS]


def stack_of(plugins: tuple[str, ...]) -> str:
    """The subset as tests name it: ``core``, ``offload``, ``offload+quantized``, ..."""
    return "+".join(name.removeprefix("polyshard-") for name in plugins) or "core"


# Tested alone and beside everything, but not in every combination: one that changes how bytes
# travel and nothing that is computed, and those that the others either leave alone or refuse.
NEUTRAL = {"polyshard-calibration", "polyshard-matrix", "polyshard-reproducible"}
COMPOSED = [name for name in PLUGINS if name not in NEUTRAL]

# Every subset of the plugins that are combined (none, each one, pairs, all), and the others alone.
SUBSETS = {
    stack_of(names): list(names)
    for count in range(len(COMPOSED))
    for names in combinations(COMPOSED, count)
}
SUBSETS |= {stack_of((name,)): [name] for name in PLUGINS if name in NEUTRAL}
SUBSETS["all"] = PLUGINS

# Rooms of core's tests in which nothing depends on what is installed beside core.
ALONE = (
    "agreement", "alarm", "checkpoint", "engine", "exchange", "group", "guards", "memory", "params",
    "rollback", "safetensors", "sharding", "stepping", "testing", "torch", "transport",
)  # fmt: skip
# Of a plugin's tests, those that run beside all others too; and whichever name another one.
BESIDE = ("test_plugin.py", "test_conformance.py")


def beside_others(folder: str) -> list[str]:
    """Tests of the plugin in ``folder`` to which it matters what else is installed."""
    names = [name.replace("-", "_") for name in PLUGINS if name != Path(folder).name]
    files = sorted((ROOT / folder / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if file.name in BESIDE or any(name in file.read_text("utf-8") for name in names)
    ]
