"""Verbs of other distributions: found by entry point, and said to be broken where they are."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from toy_entry_points import only
from typer.testing import CliRunner

from polyshard_cli.main import app
from polyshard_cli.verbs import ENTRY_POINTS, OWN


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "greet": "toy_verbs:greet",
        "several": "toy_verbs:several",
        "gone": "no_such_module:verb",
        "number": "toy_verbs:NOT_A_VERB",
    }
    points = tuple(EntryPoint(name, value, ENTRY_POINTS) for name, value in values.items())
    only(monkeypatch, points)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), list(arguments))
    said = result.exception.code if isinstance(result.exception, SystemExit) else ""
    return result.exit_code, f"{result.output}{said}"


def test_functions_and_groups_become_verbs() -> None:
    assert run("greet", "--name", "ranks") == (0, "hello ranks\n")
    assert run("several", "one")[1].startswith("one of several\n")


@pytest.mark.parametrize(
    ("verb", "reason"),
    [
        ("gone", "no_such_module:verb of an unknown distribution failed: ModuleNotFoundError"),
        ("number", "failed: it is a int, not a function or typer.Typer"),
    ],
)
def test_a_broken_verb_says_so_and_the_others_work(verb: str, reason: str) -> None:
    code, text = run(verb)
    assert code == 1
    assert reason in text
    assert run("greet")[0] == 0


@pytest.mark.parametrize("name", OWN)
def test_each_of_its_own_verbs_is_there(name: str) -> None:
    assert EntryPoint(name, OWN[name][0], ENTRY_POINTS).load()


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["migrate", "train.py"], "polyshard-cli[migrate]"),
        (["plan", "LlamaConfig", "--mesh", "dp=2"], "polyshard-cli[transformers]"),
        (["plan", ".", "--mesh", "dp=2"], "polyshard-cli[transformers]"),
    ],
)
def test_an_extra_that_is_missing_is_said_before_torch_is_imported(
    arguments: list[str], package: str
) -> None:
    script = (
        "import atexit, sys; sys.modules.update(libcst=None, transformers=None); "
        "atexit.register(lambda: print('torch' in sys.modules)); "
        "from polyshard_cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert f"pip install '{package}'" in done.stderr


def test_help_lists_verbs_and_imports_none() -> None:
    """Not torch either, which takes seconds."""
    code, text = run("--help")
    assert code == 0
    assert all(name in text for name in ("doctor", "plugins", "greet", "several", "gone"))
    script = "import sys; from polyshard_cli.main import main; main()"
    ends = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {script}"
    done = subprocess.run(
        [sys.executable, "-c", ends, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
