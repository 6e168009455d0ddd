import subprocess
from pathlib import Path

import pytest

import check_layout
from workspace import distributions

PLUGIN = "plugins/polyshard-sample"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with core and one plugin in which nothing is wrong."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "LICENSE").write_text("do as you please\n")
    write_distribution(tmp_path, "packages/polyshard", 'dependencies = ["torch"]')
    write_distribution(tmp_path, PLUGIN, 'dependencies = ["polyshard>=0.1,<0.2"]')
    return tmp_path


def write_distribution(root: Path, folder: str, table: str) -> None:
    name = Path(folder).name
    source = root / folder / "src" / name.replace("-", "_")
    source.mkdir(parents=True)
    (source / "py.typed").touch()
    (source / "__about__.py").write_text('__version__ = "0.1.0"\n')
    (root / folder / "LICENSE").write_bytes((root / "LICENSE").read_bytes())
    (root / folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n{table}\n')


def only_problem(root: Path) -> str:
    (problem,) = check_layout.problems(root)
    return problem


def test_a_sound_repository_has_no_problems(root: Path) -> None:
    assert check_layout.problems(root) == []
    assert check_layout.main([str(root)]) == 0


def test_distributions_are_found_on_disk(root: Path) -> None:
    assert [dist.name for dist in distributions(root)] == ["polyshard", "polyshard-sample"]


def test_a_changed_licence(root: Path) -> None:
    (root / PLUGIN / "LICENSE").write_text("do as you please\r\n", newline="")
    assert "differs from LICENSE" in only_problem(root)


def test_a_licence_by_symlink(root: Path) -> None:
    copy = root / PLUGIN / "LICENSE"
    copy.unlink()
    copy.symlink_to(root / "LICENSE")
    assert "must be a real file" in only_problem(root)


def test_a_missing_py_typed(root: Path) -> None:
    (root / PLUGIN / "src/polyshard_sample/py.typed").unlink()
    assert "py.typed is missing" in only_problem(root)


def test_versions_that_differ(root: Path) -> None:
    (root / PLUGIN / "src/polyshard_sample/__about__.py").write_text('__version__ = "0.1.1"\n')
    assert "version 0.1.1, but core has 0.1.0" in only_problem(root)


@pytest.mark.parametrize(
    ("dependency", "complaint"),
    [
        ("polyshard>=0.2,<0.3", "does not admit core's version 0.1.0"),
        ("polyshard>=0.1", "has no upper bound"),
    ],
)
def test_bounds_on_core(root: Path, dependency: str, complaint: str) -> None:
    table = f'[project]\nname = "polyshard-sample"\ndependencies = ["{dependency}"]\n'
    (root / PLUGIN / "pyproject.toml").write_text(table)
    assert complaint in only_problem(root)


def test_a_plugin_without_core(root: Path) -> None:
    table = (
        '[project]\nname = "polyshard-sample"\n[project.entry-points."polyshard.plugins"]\na="b"'
    )
    (root / PLUGIN / "pyproject.toml").write_text(table)
    assert "must depend on polyshard" in only_problem(root)


def test_a_folder_with_another_name(root: Path) -> None:
    (root / PLUGIN).rename(root / "plugins/other")
    assert "has another name" in only_problem(root)


@pytest.mark.parametrize(("folder", "count"), [("tools", 1), ("packages/polyshard/tests", 0)])
def test_a_long_file(root: Path, folder: str, count: int) -> None:
    path = root / folder / "long.py"
    path.parent.mkdir(parents=True)
    path.write_text("\n" * (check_layout.MAX_LINES + 1))
    assert len(check_layout.problems(root)) == count


@pytest.mark.parametrize("place", check_layout.PRIVATE_ROOTS)
def test_a_private_path(root: Path, place: str) -> None:
    (root / "notes.md").write_text(f"fine: docs/{place}/x\nsee /{place}/main\n")
    assert only_problem(root).startswith("notes.md:2: mentions a private path")
