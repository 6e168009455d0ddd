"""Pages are what their tables and classes generate, and the tables are whole."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from itertools import product
from pathlib import Path

import pytest

import make_fault_docs
import make_hook_docs
import make_house
import make_migration_docs
import make_version_docs
import subsets
from benchmarks.result import read
from composition_table import CELLS, DTYPES, FEATURES, FSDP_TP, HSDP, PLUGINS, REFUSALS, STACKS
from fault_table import BAR_SECONDS, FAULT_CELLS, FAULTS, SAMPLE, TIMEOUT_SECONDS
from polyshard import transport
from polyshard_cli.migrate.terms.catalog import GUIDES
from polyshard_cli.migrate.terms.term import Verdict
from try_version import RESULTS
from write_pages import MAKERS, files_of, page_with

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("maker", MAKERS)
def test_pages_are_current(maker: str) -> None:
    for path, text in files_of(maker).items():
        assert path.read_text("utf-8") == text, "run python tools/write_pages.py"


def test_parts_of_a_page_are_replaced_and_one_that_it_lacks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n<!-- a -->\nold\n<!-- end -->\nby hand\n<!-- b -->\n<!-- end -->\n")
    expected = "by hand\n<!-- a -->\nnew\n<!-- end -->\nby hand\n<!-- b -->\n1\n2\n<!-- end -->\n"
    assert page_with(page, a="new\n", b="1\n2") == {page: expected}
    with pytest.raises(LookupError, match=r"page.md has no line <!-- c -->"):
        page_with(page, a="new", c="newer")


def test_gallery_modules_are_short_and_public_and_the_page_shows_each() -> None:
    folder = ROOT / "examples" / "plugins"
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["polyshard.plugins"].values()
    front = "polyshard_gallery"
    found = sorted((folder / "src" / front).glob("*.py"))
    modules = {path.stem: path for path in found if path.stem != "__init__"}
    assert {point.partition(":")[0] for point in points} == {f"{front}.{name}" for name in modules}
    public = {"polyshard", "polyshard.plugins.seams", "polyshard.transport", "polyshard_testing"}
    page = (folder / "README.md").read_text("utf-8")
    for name, path in modules.items():
        assert f"](src/{front}/{name}.py)" in page
        assert (folder / "tests" / f"test_{name}.py").is_file()
        code = path.read_text("utf-8")
        assert len(code.splitlines()) < 100, name
        imported = re.findall(r"^ *(?:from|import) (polyshard[\w.]*)", code, re.M)
        assert set(imported) <= public, name


def test_the_table_of_combinations_is_whole() -> None:
    assert set(subsets.PLUGINS) >= subsets.NEUTRAL
    assert len(STACKS) == len(set(STACKS)) == 2 ** len(PLUGINS)
    found = {(cell.stack, cell.dtype, cell.feature) for cell in CELLS}
    assert found == set(product(STACKS, DTYPES, FEATURES))
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    for stack in STACKS:
        meshes = {cell.layout for cell in CELLS if cell.stack == stack}
        assert (FSDP_TP if "tensor-parallel" in stack else HSDP) in meshes
        assert any(layout.replicas > 1 for layout in meshes)
        assert "tensor-parallel" in stack or all(layout.tensor == 1 for layout in meshes)


def test_refusals_are_named_once_and_say_something() -> None:
    assert len({refusal.id for refusal in REFUSALS}) == len(REFUSALS)
    for refusal in REFUSALS:
        assert refusal.error.endswith("Error")
        assert len(refusal.words) > 5
        assert set(refusal.stack) | set(refusal.absent) <= set(map(subsets.short, subsets.PLUGINS))


def test_every_fault_has_figures_below_the_bar() -> None:
    files = (make_fault_docs.FIGURES / f"{name}.json" for name in ("cells", "device"))
    seconds = {name: each for file in files for name, each in read(file).found["seconds"].items()}
    cells = {cell.id: cell for cell in FAULT_CELLS}
    assert set(seconds) == set(cells)
    assert len(cells) == len(FAULT_CELLS)
    for name, found in seconds.items():
        cell = cells[name]
        assert len(found) == cell.layout.ranks
        gone = () if cell.struck_kind else cell.struck
        assert [rank for rank, each in enumerate(found) if each is None] == list(gone)
        assert all(each < BAR_SECONDS for each in found if each is not None)
    assert {cell.stack for cell in FAULT_CELLS} == set(STACKS)
    assert set(SAMPLE) <= {fault.id for fault in FAULTS}
    assert BAR_SECONDS * 5 <= TIMEOUT_SECONDS


def test_every_room_is_on_a_floor_and_imports_go_down() -> None:
    house = make_house.floors()
    level = {room.name: row for row, rooms in enumerate(house) for room in rooms}
    files = {path.stem for path in make_house.SOURCE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in make_house.SOURCE.glob("*/__init__.py")}
    assert set(level) == files | folders
    for room in (room for rooms in house for room in rooms):
        for target in make_house.imports(room):
            assert level[target] > level[room.name], f"{room.name} imports {target}"
    text = make_house.PAGE.read_text("utf-8").partition("## Where do I go")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 12  # changes that have a place


def test_every_public_name_of_transports_is_on_its_page() -> None:
    text = make_hook_docs.files()[make_hook_docs.TRANSPORT_PAGE]
    for name in transport.__all__:
        kind = getattr(transport, name)
        assert (f"\n## {name}\n" if inspect.isclass(kind) else f"`{name}(") in text, name
    assert "as the base says" not in text.partition("## WrappedTransport")[0]


def test_every_term_of_migration_is_in_a_row_of_three_cells() -> None:
    assert set(make_migration_docs.WORDS) == set(Verdict)
    (page,) = make_migration_docs.files().values()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(row.count(" | ") == 2 for row in rows), "a cell holds a bar"
    named = [name for row in rows for name in row.strip("| ").split(" | ")[0].split(", ")]
    terms = [term for guide in GUIDES for table in guide.tables for term in table.terms]
    assert sorted(named) == sorted(f"`{term.theirs}`" for term in terms)


def test_the_page_of_versions_has_those_that_are_supported() -> None:
    source = (ROOT / "packages/polyshard/src/polyshard/_torch/newer.py").read_text("utf-8")
    (ends,) = re.findall(r"^OLDEST, NEWEST = \((\d+), (\d+)\), \((\d+), (\d+)\)$", source, re.M)
    torches = make_version_docs.TORCHES
    assert (torches[0].split("."), torches[-1].split(".")) == (list(ends[:2]), list(ends[2:]))
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    (named,) = re.findall(r"^TORCHES = \((.*)\)$", noxfile, re.M)
    assert tuple(re.findall(r'"(\d+\.\d+)\.', named)) == torches
    assert ", ".join(map(subsets.short, subsets.COMPOSED)) in make_version_docs.PAGE.read_text(
        "utf-8"
    )
    (pythons,) = re.findall(r"^PYTHONS = \((.*)\)$", noxfile, re.M)
    assert tuple(re.findall(r'"([\d.]+)"', pythons)) == make_version_docs.PYTHONS


@pytest.mark.parametrize("name", ["README.md", "docs/reference/support.md"])
def test_documents_name_versions_that_were_tried(name: str) -> None:
    said = re.search(r"Tested with torch .*?\.\s", (ROOT / name).read_text("utf-8"), re.S)
    assert said is not None
    tried = {
        ".".join(one["torch"].split(".")[:2])
        for one in json.loads(RESULTS.read_text("utf-8"))
        if any("passed" in text for text in one["conformance"].values())
        and not any(text.startswith("failed") for text in one["conformance"].values())
    }
    assert {"2.13", "2.15"} <= set(re.findall(r"2\.\d+", said[0])) <= tried
