"""Which distributions there are, and which subsets of the plugins are tested with what."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

__all__ = ["COMPOSED", "FOLDERS", "NEUTRAL", "PACKAGES", "PLUGINS", "SUBSETS", "alone", "stack_of"]

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
NEUTRAL = {"polyshard-calibration", "polyshard-reproducible"}
COMPOSED = [name for name in PLUGINS if name not in NEUTRAL]

# Every subset of the plugins that are combined (none, each one, pairs, all), and the others alone.
SUBSETS = {
    stack_of(names): list(names)
    for count in range(len(COMPOSED))
    for names in combinations(COMPOSED, count)
}
SUBSETS |= {stack_of((name,)): [name] for name in PLUGINS if name in NEUTRAL}
SUBSETS["all"] = PLUGINS

# Of the tests of core and of a plugin, those to which it matters what else is installed.
ROOMS = ("plugins",)
CONFORMANCE = ("test_plugin.py", "test_conformance.py")
# Of the combinations, what has cells of its own for each subset.
CELLS = ("test_composition.py", "test_attempts.py", "test_faults.py", "test_models.py")


def alone(plugins: list[str], whole: bool = False) -> list[str]:
    """Paths and options of the tests of a subset with nothing else installed.

    Those that depend on what is installed, or with ``whole`` all tests of the subset.
    """
    paths: list[str] = []
    if not plugins:
        core = ROOT / "packages" / "polyshard" / "tests"
        files = [*map(core.joinpath, ROOMS), *sorted(core.glob("test_*.py"))]
        files += sorted((ROOT / "packages" / "polyshard-cli" / "tests").glob("test_*.py"))
        paths += [f"packages/{name}/tests" for name in PACKAGES] if whole else _relative(files)
    for name in plugins if len(plugins) == 1 else []:
        tests = ROOT / "plugins" / name / "tests"
        files = [file for file in sorted(tests.rglob("test_*.py")) if file.name in CONFORMANCE]
        paths += _relative([tests] if whole or not files else files)
    if not NEUTRAL.intersection(plugins):
        cells = ["integration_tests"] if whole else [f"integration_tests/{name}" for name in CELLS]
        paths += [*cells, f"--stack={stack_of(tuple(plugins))}"]  # an option known there alone
    return paths


def _relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]
