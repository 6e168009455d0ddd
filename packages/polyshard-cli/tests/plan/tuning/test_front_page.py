"""A search as a page: its front, and the plan of what it chose."""

from __future__ import annotations

from pathlib import Path

import typer
from plan_pages import Parsed
from typer.testing import CliRunner

from polyshard.planning import readable
from polyshard_cli.plan import Open, Settings, parse_mesh, tune
from polyshard_cli.plan.command import plan
from polyshard_cli.plan.tuning.sections import tuning_page


def test_the_page_has_the_front_and_the_plan_of_the_best() -> None:
    settings = Settings(model="demo:tiny", mesh=parse_mesh("dp=4"), batch=8)
    found = tune(settings, Open(keep=frozenset({"units", "offload"})))
    assert found.best.mesh != "dp=4", "the plan that follows is not of what was asked for"
    parsed = Parsed.of(tuning_page(found, settings))
    said = " ".join(parsed.texts)
    for point in found.front:
        at = parsed.texts.index(f"{point.seconds * 1e3:,.3f}")
        assert readable(point.memory_bytes) in parsed.texts[at + 1 : at + 3]
    assert found.best.name in said
    (axis,) = (part for part in found.best.mesh.split(",") if part.startswith("replicate"))
    assert f"on 4 ranks ({axis.replace('=', ' = ')}" in said
    ids = [attributes.get("id") for _, attributes in parsed.tags]
    assert ids.index("tuning") < ids.index("memory")


def test_the_command_writes_it(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("plan")(plan)
    file = tmp_path / "front.html"
    options = ["demo:tiny", "--mesh", "dp=2", "--tune", "--keep", "units", "--html", str(file)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert f"written: {file}" in result.output
    assert "tuning" in [a.get("id") for _, a in Parsed.of(file.read_text("utf-8")).tags]
