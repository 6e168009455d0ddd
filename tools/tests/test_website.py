"""What the site is made of: pages, links, contents, public names; nothing is built here."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from build_site import REFERENCE, list_versions, stage
from named_tests import is_there, named_in
from website.contents import contents, toctree
from website.links import HOSTS, LinkError, Map, checked_address, links, targets
from website.names import public_modules, public_names, reference
from website.pages import START, pages
from workspace import distributions

ROOT = Path(__file__).parents[2]
PAGES = pages(ROOT)


@pytest.fixture
def small(tmp_path: Path) -> Map:
    """A repository of three pages and a picture."""
    (tmp_path / "docs/how-to").mkdir(parents=True)
    (tmp_path / "docs/assets").mkdir()
    (tmp_path / "docs/assets/a.svg").touch()
    (tmp_path / "docs/index.md").write_text("# I\n\n[how](how-to/x.md)\n", "utf-8")
    (tmp_path / "docs/how-to/x.md").write_text("# X\n", "utf-8")
    (tmp_path / "README.md").write_text("# R\n", "utf-8")
    (tmp_path / "tool.py").touch()
    return Map(tmp_path, pages(tmp_path))


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[i](docs/index.md#here)", "[i](index.md#here)"),
        ("docs/how-to/x.md", "[r](../../README.md)", "[r](../readme.md)"),
        ("docs/how-to/x.md", "![a](../assets/a.svg)", "![a](../assets/a.svg)"),
        ("README.md", "![a](docs/assets/a.svg)", "![a](assets/a.svg)"),
        ("docs/index.md", "[t](../tool.py)", "[t](files/tool.py)"),
        ("docs/index.md", "[r](..)", "[r](readme.md)"),
        ("docs/index.md", "[here](#section)", "[here](#section)"),
        ("docs/index.md", "`[no](link.md)`", "`[no](link.md)`"),
        ("docs/index.md", "```\n[no](link.md)\n```", "```\n[no](link.md)\n```"),
        ("docs/index.md", "[p](https://pypi.org/project/x/)", "[p](https://pypi.org/project/x/)"),
    ],
)
def test_links_hold_on_the_site(small: Map, page: str, text: str, expected: str) -> None:
    assert small.moved(small.root / page, text) == expected


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gone.md", "is not there"),
        ("http://pypi.org/", "write https"),
        ("https://example.org/", "add example.org to HOSTS"),
    ],
)
def test_links_that_lead_nowhere_are_named_with_their_line(
    small: Map, target: str, said: str
) -> None:
    with pytest.raises(LinkError, match=rf"^docs/index.md:3: .*{said}"):
        small.moved(small.root / "docs/index.md", f"# A\n\n[x]({target})\n")


def test_every_linked_file_is_copied(small: Map, tmp_path: Path) -> None:
    text = "# R\n\n![a](docs/assets/a.svg) [t](tool.py)\n"
    (small.root / "README.md").write_text(text, "utf-8")
    assert small.linked_files() == {small.root / "docs/assets/a.svg", small.root / "tool.py"}


def test_pictures_are_targets_and_no_links() -> None:
    text = "![a](a.svg) and [b\nc `d`](e.md)"
    assert targets(text) == ["a.svg", "e.md"]
    assert links(text) == [("b c d", "e.md")]


def test_contents_are_the_links_of_index_pages() -> None:
    texts = {
        "index.md": "[r](r.md)\n## One\n[A](a.md) [sub](s/index.md)\n## Two\n[A](a.md) [B](b.md)",
        "s/index.md": "[up](../b.md) [c](c.md#x)",
        "s/c.md": "",
        "a.md": "[b](b.md) [d](d.md)",
        "b.md": "",
        "d.md": "",
        "r.md": "",
    }
    found = contents({PurePosixPath(k): v for k, v in texts.items()}, PurePosixPath("index.md"))
    listed = {
        str(page): [(part.caption, {str(k): v for k, v in part.pages.items()}) for part in parts]
        for page, parts in found.items()
    }
    assert listed == {
        "index.md": [
            ("", {"r.md": "r"}),
            ("One", {"a.md": "A", "s/index.md": "sub"}),
            ("Two", {"b.md": "B"}),
        ],
        "s/index.md": [("", {"s/c.md": "c"})],  # d.md hangs nowhere: a.md is no index
    }
    directive = toctree(PurePosixPath("s/index.md"), found[PurePosixPath("s/index.md")][0])
    assert "\nc <c.md>\n" in directive


def test_every_page_hangs_somewhere() -> None:
    """Below the start page, by the links of index pages."""
    texts = {
        place: Map(ROOT, PAGES).moved(file, file.read_text("utf-8"))
        for file, place in PAGES.items()
    }
    start = PurePosixPath(START)
    hanging = {
        path for parts in contents(texts, start).values() for part in parts for path in part.pages
    }
    assert hanging == set(texts) - {start}


def test_hosts_are_used() -> None:
    """A host that no page links any more goes from the list of those that may be."""
    text = "\n".join(file.read_text("utf-8") for file in PAGES)
    assert [host for host in sorted(HOSTS) if f"https://{host}" not in text] == []
    assert checked_address("https://github.com/pytorch/pytorch/issues/1")


def test_the_page_lists_the_public_modules() -> None:
    text = (ROOT / "docs" / REFERENCE).read_text("utf-8")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert rows == public_modules(ROOT)


def test_names_are_described_once_and_listed_everywhere() -> None:
    made = reference(["polyshard", "polyshard.seams"])
    assert ".. autoclass:: polyshard.GatherCodec\n" in made["polyshard"]
    assert ":py:obj:`polyshard.GatherCodec`" in made["polyshard.seams"]
    assert ".. py:class:: MixedPrecisionPolicy\n" in made["polyshard"]  # not in torch's words


def test_a_module_without_all_shows_what_it_defines() -> None:
    from polyshard import errors

    names = {name.name for name in public_names(errors)}
    assert {"PolyshardError", "SkippedStepWarning"} <= names
    assert "annotations" not in names


def test_staged_pages_have_a_table_of_contents(tmp_path: Path) -> None:
    stage(ROOT, tmp_path)
    start = (tmp_path / "index.md").read_text("utf-8")
    assert ":caption: Reference" in start
    assert "What it is, in a minute <readme.md>" in start
    api = (tmp_path / REFERENCE).read_text("utf-8")
    assert "polyshard.seams <api/polyshard.seams.rst>" in api
    assert (tmp_path / "files/examples/plugins/src/polyshard_gallery/topk.py").is_file()


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.2", "0.10", "source"):
        (tmp_path / name).mkdir()
    assert list_versions(tmp_path) == ["0.10", "0.2"]
    assert 'url=0.10/index.html"' in (tmp_path / "index.html").read_text("utf-8")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(file: Path) -> None:
    named = named_in(file.read_text("utf-8"))
    assert [name for name in named if not is_there(name)] == []


def test_readmes_say_alike_how_to_install() -> None:
    for dist in distributions(ROOT):
        folder = dist.folder.relative_to(ROOT)
        needed = {re.split(r"[\[<>=]", text)[0] for text in dist.project["dependencies"]}
        others = [d for d in distributions(ROOT) if d.name in needed and d.name != dist.name]
        before = "".join(f"./{other.folder.relative_to(ROOT)} " for other in others)
        text = (dist.folder / "README.md").read_text("utf-8")
        line = next(line for line in text.splitlines() if line.startswith("pip install "))
        assert line.split()[:3] == ["pip", "install", dist.name]
        assert line.endswith(f"# or, in a checkout: pip install {before}./{folder}")
