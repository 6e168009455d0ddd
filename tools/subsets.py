"""Which distributions there are, and which subsets of the plugins are tested with what."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A folder with a pyproject.toml is a distribution. It is found, never listed.
PACKAGES = [path.parent.name for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
PLUGINS = [path.parent.name for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
FOLDERS = [f"packages/{name}" for name in PACKAGES] + [f"plugins/{name}" for name in PLUGINS]


def short(distribution: str) -> str:
    """The name without what all have in common."""
    return distribution.removeprefix("polyshard-")


def stack_of(plugins: Iterable[str]) -> str:
    """The subset as tests name it: ``core``, ``offload``, ``offload+quantized``, ..."""
    return "+".join(map(short, plugins)) or "core"


# Tested alone and beside everything, but not in every combination: one that changes how bytes
# travel and nothing that is computed, and those that the others either leave alone or refuse.
NEUTRAL = {"polyshard-calibration", "polyshard-reproducible"}
COMPOSED = [name for name in PLUGINS if name not in NEUTRAL]

# Every subset of the plugins that are combined (none, each one, pairs, all), and the others alone.
SUBSETS = {
    stack_of(names): list(names)
    for count in range(len(COMPOSED))
    for names in combinations(COMPOSED, count)
}
SUBSETS |= {short(name): [name] for name in PLUGINS if name in NEUTRAL}
SUBSETS["all"] = PLUGINS

# Of core's tests, those to which it matters what else is installed.
ROOMS = ("plugins",)
# Of the combinations, what has cells of its own for each subset.
CELLS = ("test_composition.py", "test_attempts.py", "test_faults.py", "test_models.py")


def alone(plugins: list[str]) -> dict[str, list[str]]:
    """What depends on which plugins are installed: paths and options of each run, by its name."""
    name = stack_of(plugins)
    runs = {}
    if not plugins:
        core = ROOT / "packages" / "polyshard" / "tests"
        files = [*map(core.joinpath, ROOMS), *sorted(core.glob("test_*.py"))]
        files += sorted((ROOT / "packages" / "polyshard-cli" / "tests").glob("test_*.py"))
        runs[name] = [str(path.relative_to(ROOT)) for path in files]
    if not NEUTRAL.intersection(plugins):
        cells = [f"integration_tests/{file}" for file in CELLS]
        runs[f"{name}-cells"] = [*cells, f"--stack={name}"]  # an option known there alone
    return runs


def whole(plugins: list[str]) -> list[str]:
    """Paths and options of all tests of a subset."""
    paths = [] if plugins else [f"packages/{name}/tests" for name in PACKAGES]
    if len(plugins) == 1:
        paths += [f"plugins/{plugins[0]}/tests"]
    if not NEUTRAL.intersection(plugins):  # other combinations need plugins that are not there
        paths += [f"integration_tests/{file}" for file in (*CELLS, "test_sim.py")]
        paths += [f"--stack={stack_of(plugins)}"]
    return paths
