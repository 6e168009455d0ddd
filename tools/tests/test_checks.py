"""What the checks of the repository find wrong, and that nothing is wrong with this one."""

from __future__ import annotations

import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import check_docs
import check_layout
import check_prose
from check_template import TEMPLATE, leftovers, seams
from headless import DESK, PHONE, OpenPage
from workspace import ENTRY_POINT_GROUP, distributions

ROOT = Path(__file__).parents[2]
RUN = "```python run\n{}\n```\n"
GROUP = RUN.format("torch.distributed.init_process_group()")
UNSEEDED = RUN.format(
    """
import torch
from polyshard import fully_shard
torch.distributed.init_process_group("gloo")
fully_shard(torch.nn.Linear(2, 2))(torch.ones(1, 2))
"""
)
PLUGIN = "plugins/polyshard-sample"
POINTS = [
    EntryPoint(name, value, ENTRY_POINT_GROUP)
    for dist in distributions(ROOT)
    for name, value in dist.entry_points.get(ENTRY_POINT_GROUP, {}).items()
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_plugins_with_a_name_need_no_argument(point: EntryPoint) -> None:
    pytest.importorskip(point.module)
    from polyshard.plugins.contract import contract_of

    assert contract_of(point.load()()).name == point.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RUN.format("x = 1") + "text\n" + RUN.format("assert x == 1"), None),
        ("# Title\n\n" + RUN.format("x = 1") + "\n" + RUN.format("assert x == 2"), "line 8"),
        ("text\n```python\nx = 1\n```\n", "line 2: say either ```python run or"),
        ("<!-- not run: -->\n\n```python\nx = 1\n```\n", "say either"),
        ("<!-- not run: needs a cluster -->\n\n```python\nraise OSError\n```\n", None),
        ("<!-- not run: because -->\n" + RUN.format("x = 1"), "say either"),
        ("```console\n$ false\n```\n````text\n```python\nx\n```\n````\n", None),
        ("1. item\n\n   ```python run\n   assert 0\n   ```\n", "line 4"),
        (f"<!-- ranks: 2 -->\n{GROUP}{GROUP}", "makes 2 process groups"),
        (
            "<!-- ranks: 2 -->\n" + RUN.format("import os\nos.environ['WORLD_SIZE'] == '2' or 1/0"),
            None,
        ),
        (f"<!-- ranks: 2 -->\n{UNSEEDED}", "DifferentValuesWarning"),
    ],
)
def test_blocks_of_pages_run_or_say_why_not(tmp_path: Path, text: str, said: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    failure = check_docs.run_page(page)
    assert failure is None if said is None else said in (failure or "")


BEGINNING = "# Title\n\nThis page is for tests.\n\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BEGINNING, []),
        ("# Title\n\n- a list\n\nText.\n", []),
        ("# Title\n\n## Section\n", ["1: begin with"]),
        ("Text without a title.\n", ["1: begin with"]),
        (f"{BEGINNING}Then nobody\nwaits.\n", ["5: 'nobody': write the rank"]),
        (f"{BEGINNING}| a | b |\n|---|---|\n| c | it was mended |\n", ["7: 'mended': write fix"]),
        (f"{BEGINNING}`nobody`, [nobody.md](nobody.md)\n", ["5: 'nobody'"]),
        (f"{BEGINNING}```text\nnobody {'word ' * 40}\n```\n", []),
        (f"{BEGINNING}{'word ' * 35}.\n", []),
        (f"{BEGINNING}- {'word ' * 36}.\n", ["5: 36 words in a sentence"]),
        (f"{BEGINNING}{'word ' * 20}e. {'Word ' * 20}.\n", []),
        (f"{BEGINNING}{'`a b` ' * 30}.\n", []),
    ],
)
def test_prose_is_judged_and_code_is_not(text: str, said: list[str]) -> None:
    found = list(check_prose.problems(text))
    assert len(found) == len(said), found
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_docstrings_and_comments_are_judged() -> None:
    source = '''x = "nobody"\n\n\ndef f():\n    """It is\n\n    `mended`, mended."""  # whoever\n'''
    found = list(check_prose.problems(source, is_code=True))
    assert [one.partition(": write")[0] for one in found] == ["7: 'mended'", "7: 'whoever'"]


def test_generated_pages_and_sources_are_judged() -> None:
    names = {page.name for page in check_prose.default_pages(ROOT)}
    assert {"hooks.md", "seams.md", "experts.md", "transport.md", "simulated.md"} <= names
    assert "root.py" in names
    assert len(names) > 50


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with core and one plugin in which nothing is wrong."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "LICENSE").write_text("do as you please\n")
    for folder, need in (("packages/polyshard", "torch"), (PLUGIN, "polyshard>=0.1,<0.2")):
        name = Path(folder).name
        files = {
            f"src/{name.replace('-', '_')}/py.typed": "",
            f"src/{name.replace('-', '_')}/__about__.py": '__version__ = "0.1.0"\n',
            "LICENSE": "do as you please\n",
            "pyproject.toml": f'[project]\nname = "{name}"\ndependencies = ["{need}"]\n',
        }
        for path, text in files.items():
            (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / path).write_text(text)
    return tmp_path


PROJECT, SOURCE = f"{PLUGIN}/pyproject.toml", f"{PLUGIN}/src/polyshard_sample"
NAMED = '[project]\nname = "polyshard-sample"\n'


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (f"{PLUGIN}/LICENSE", "do as you please\r\n", "differs from LICENSE"),
        (f"{SOURCE}/__about__.py", '__version__ = "0.1.1"\n', "core has 0.1.0"),
        (PROJECT, f'{NAMED}dependencies = ["polyshard>=0.2,<1"]', "does not admit"),
        (PROJECT, f'{NAMED}dependencies = ["polyshard>=0.1"]', "no upper bound"),
        (PROJECT, '[project]\nname = "other"\ndependencies = ["polyshard<1"]', "has another name"),
        ("tools/long.py", "\n" * (check_layout.MAX_LINES + 1), f"{check_layout.MAX_LINES} allowed"),
        ("notes.md", f"see /{check_layout.PRIVATE_ROOTS[0]}/main\n", "mentions a private path"),
    ],
)  # fmt: skip
def test_what_the_layout_forbids_is_found(root: Path, file: str, text: str, said: str) -> None:
    assert check_layout.problems(root) == []
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text, newline="")
    assert any(said in problem for problem in check_layout.problems(root))


def test_the_template_has_every_seam_and_no_name_of_its_example(tmp_path: Path) -> None:
    for seam in seams():
        assert (TEMPLATE / "seams" / f"{seam}.tmpl").is_file()
        assert (TEMPLATE / "seams" / f"test_{seam}.tmpl").is_file()
    (tmp_path / "a.py").write_text("fine: sent_bytes = {payload_bytes: 1}\n", encoding="utf-8")
    assert leftovers(tmp_path) == []
    (tmp_path / "README.md").write_text("fine\nsee polyshard-byte-counter\n", encoding="utf-8")
    assert leftovers(tmp_path)[0].startswith("README.md:2: ")


FAULTS = {
    "<h1>One</h1><div style='width: 500px'>wide</div>": "is 5",
    "<h1>One</h1><h3>Three</h3>": 'heading "Three" skips a level',
    "<h1>One</h1><svg id='s' width='0' height='0'></svg>": "picture s is not",
    "<h1>One</h1><img alt='i' src='data:image/png;base64,xx'>": "was not loaded",
    "<h1>One</h1><p style='color: #ccc'>pale</p>": '"pale" has a contrast of 1.6',
    "<h1>One</h1><a href='#gone'>gone</a>": "link to gone leads nowhere",
    "<h1 id='a'>One</h1><p id='a'>two</p>": "id a is there twice",
    "<h1>One</h1><script>throw Error('boom')</script>": "complained: boom",
    "<h1>One</h1><img alt='i' src='http://localhost:9/a.png'>": "fetched http://local",
}


@pytest.mark.browser
def test_what_looks_at_pages_sees_every_fault(tmp_path: Path, open_page: OpenPage) -> None:
    path = tmp_path / "page.html"
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>T</title>"
        "<meta name='viewport' content='width=device-width'></head>"
    )
    table = "<h1>One</h1><table><tr><td>untold</td></tr></table>"
    for body, expected in (("<h1>One</h1>", ""), (table, ""), *FAULTS.items()):
        path.write_text(f"{head}<body>{body}</body></html>", encoding="utf-8")
        for width in (PHONE, DESK) if not expected else (PHONE,):
            with open_page(path, width) as tab:
                faults = tab.faults()
                assert any(expected in one for one in faults) if expected else not faults, body
                assert tab.untold_tables() == (["untold"] if body == table else [])
