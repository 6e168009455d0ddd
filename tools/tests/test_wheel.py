"""Core's wheel, built as a release builds it, and used from where it was unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "polyshard"
TEMPLATE = Path("polyshard", "cli", "template")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds the wheel's files and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=CORE, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_template_travels_whole(site: Path) -> None:
    """Hatch leaves out what git ignores, so a pattern there could empty it."""
    checkout = CORE / "src" / TEMPLATE
    kept = {path.relative_to(checkout): path for path in checkout.rglob("*") if path.is_file()}
    assert len(kept) > 20
    for relative, path in kept.items():
        assert (site / TEMPLATE / relative).read_bytes() == path.read_bytes(), relative


def test_a_plugin_is_begun_from_the_wheel(site: Path, tmp_path: Path) -> None:
    copier = pytest.importorskip("copier")
    program = (
        "import polyshard, sys; from polyshard.cli.main import main\n"
        "assert polyshard.__file__.startswith(sys.path[0]), polyshard.__file__\n"
        "main()"
    )
    search = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    command = [sys.executable, "-c", search + program]
    command += ["plugins", "new", "quokka", "--seam", "storage"]
    # What stands beside polyshard in this environment, wherever copier is installed.
    beside = str(Path(copier.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": beside}
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, env=env)
    assert (tmp_path / "polyshard-quokka" / "tests" / "test_plugin.py").is_file()
