"""The command line: a diff, JSON as documented, exit codes, and one message for bad input."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from polyshard_cli.migrate.command import migrate

CLEAN = "from torch.distributed.fsdp import fully_shard\n\nfully_shard(model)\n"
DONE = CLEAN.replace("torch.distributed.fsdp", "polyshard")
HAND = "from torch.distributed.fsdp import *\n"


def run(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command("migrate")(migrate)
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def made(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_diff_and_nothing_else_happens(tmp_path: Path) -> None:
    path = made(tmp_path, CLEAN)
    code, text = run(path)
    assert code == 0
    assert f"--- a{path}\n+++ b{path}\n" in text
    assert "-from torch.distributed.fsdp import fully_shard\n" in text
    assert "+from polyshard import fully_shard\n" in text
    assert "1 of 1 file would change" in text
    assert path.read_text() == CLEAN


@pytest.mark.parametrize("option", ["--write", "--json"])
def test_files_that_are_not_concerned_may_be_of_any_encoding(tmp_path: Path, option: str) -> None:
    made(tmp_path, CLEAN)
    old = b"# -*- coding: latin-1 -*-\nx = '\xe9'\n"
    (tmp_path / "old.py").write_bytes(old)
    code, text = run(tmp_path, option)
    assert code == 0
    assert "old.py" in text or option == "--write"
    assert (tmp_path / "old.py").read_bytes() == old


def test_syntax_of_a_newer_python(tmp_path: Path) -> None:
    path = made(tmp_path, CLEAN + "type Pair = tuple[int, int]\n")
    assert run(path, "--write")[0] == 0
    assert path.read_text() == DONE + "type Pair = tuple[int, int]\n"


def test_writing_keeps_the_mode_and_follows_links(tmp_path: Path) -> None:
    path = made(tmp_path, CLEAN, "real/train.py")
    path.chmod(0o750)
    link = tmp_path / "train.py"
    link.symlink_to(path)
    code, text = run(link, "--write")
    assert (code, path.read_text()) == (0, DONE)
    assert "1 of 1 file changed." in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert link.is_symlink()
    assert [p.name for p in path.parent.iterdir()] == ["train.py"]
    assert run(link)[1].startswith("0 of 1 file would change")


def test_what_is_left_is_the_exit_code(tmp_path: Path) -> None:
    code, text = run(made(tmp_path, HAND))
    assert code == 1
    assert "To do by hand" in text
    assert "line 1: torch.distributed.fsdp: a star import" in text
    assert "1 to do by hand." in text


def test_lines_are_those_of_the_file_that_is_there(tmp_path: Path) -> None:
    """A wrap of one line becomes several; what follows it is found where it lies after."""
    wrapped = (
        "model = FSDP(model, auto_wrap_policy=functools.partial(P, transformer_layer_cls={B}))"
    )
    imports = "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as P"
    names = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"
    path = made(tmp_path, f"import functools\n{names}\n{imports}\n{wrapped}\n{HAND}")
    before = json.loads(run(path, "--json")[1])["files"][0]["findings"][-1]["line"]
    after = json.loads(run(path, "--write", "--json")[1])["files"][0]["findings"][-1]["line"]
    assert (before, after > before) == (5, True)
    assert path.read_text().splitlines()[after - 1] == HAND.splitlines()[0]


def test_folders_are_searched_where_scripts_lie(tmp_path: Path) -> None:
    ours = made(tmp_path, CLEAN, "a/train.py")
    made(tmp_path, "def broken(:\n", "a/unconcerned.py")
    for name in (".venv/x.py", "a/__pycache__/x.py", "site-packages/x.py"):
        made(tmp_path, CLEAN, name)
    code, text = run(tmp_path, ours, "--json")
    found = json.loads(text)
    changed = [file["path"] for file in found["files"] if file["changed"]]
    assert (code, changed) == (0, [str(ours)])


def test_every_key_is_documented(tmp_path: Path) -> None:
    page = Path(__file__).parents[4] / "docs" / "reference" / "migration-json.md"
    code, text = run(made(tmp_path, CLEAN + HAND), "--json")
    found = json.loads(text)
    assert (code, found["schema"], found["left"]) == (1, 1, 1)
    (file,) = found["files"]
    assert file["counts"] == {"changed": 1, "differs": 0, "hand": 1, "refused": 0}
    assert {each["kind"] for each in file["findings"]} == {"changed", "hand"}
    known = page.read_text("utf-8")
    assert not [key for key in sorted(keys(found)) if f"`{key}`" not in known]


def keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(keys, value.values()))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, b"", "there is no such file"),
        ("train.py", b"import fsdp\ndef f(:\n", "train.py:2: Python cannot"),
        ("train.py", b"fsdp\0", "binary"),
        ("train.py", b"# -*- coding: utf-8 -*-\nx = 'fsdp \xff'\n", "encoding"),
        ("train.py", b"# -*- coding: nothing -*-\nfsdp\n", "encoding"),
        ("train.py", b"# fsdp\nx = " + b"a + " * 1500 + b"a\n", "nested too deeply"),
        ("train.ipynb", b"{}", "notebook"),
        ("train.sh", b"", "not a Python file"),
        ("folder/notes.txt", b"", "no .py file"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path, name: str | None, content: bytes, words: str
) -> None:
    good = made(tmp_path, CLEAN, "good.py")
    path = tmp_path / (name or "missing.py")
    path.parent.mkdir(exist_ok=True)
    if name:
        path.write_bytes(content)
    code, text = run(good, path.parent if "folder" in str(name) else path, "--write")
    assert code == 2
    assert words in text
    assert text.count("error: ") == 1
    assert good.read_text() == CLEAN  # nothing is written unless everything can be read


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    path = made(tmp_path, "import deepspeed\ne = deepspeed.initialize(model=m)\n")
    code, text = run(path, "--deepspeed-config", tmp_path / "none.json")
    assert code == 2
    assert "cannot be read" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = made(tmp_path, CLEAN, "a/train.py")
    path.parent.chmod(0o500)
    try:
        code, text = run(path, "--write")
    finally:
        path.parent.chmod(0o700)
    assert code == 2
    assert "cannot be written" in text
    assert path.read_text() == CLEAN


def test_names_of_scripts_are_no_markup(tmp_path: Path) -> None:
    _, text = run(made(tmp_path, HAND, "[bold]x.py"))
    assert "[bold]x.py" in text
