"""Pages without a browser: they parse, hold the plan's numbers, and ask for nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plan_pages
import pytest
import typer
from plan_pages import OUTCOME, Parsed
from typer.testing import CliRunner

from polyshard.planning import readable
from polyshard_cli.plan import parse_mesh
from polyshard_cli.plan.command import plan
from polyshard_cli.plan.page.blocks import Bar, Bars, Items, Plot, Section, Series, Table, Text
from polyshard_cli.plan.page.html import render
from polyshard_cli.plan.report.outcome import RankFacts, predicted_facts, run_page
from polyshard_cli.plan.report.sections import plan_page


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return plan_pages.pages()


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command("plan")(plan)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    return result.exit_code, " ".join(result.output.split())


def test_every_page_parses_and_asks_for_nothing(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        parsed = Parsed.of(page)
        assert parsed.count("script") == 0, name
        loaded = [
            value
            for tag, attributes in parsed.tags
            for key, value in attributes.items()
            if key in {"src", "href", "xlink:href"} and tag != "a" and value
        ]
        assert [value for value in loaded if not value.startswith(("#", "data:"))] == [], name
        assert "url(" not in re.sub(r"url\(#[^)]+\)", "", page), name
        assert "@import" not in page
        ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
        assert len(ids) == len(set(ids)), name


def test_a_plan_holds_its_numbers() -> None:
    document = plan_pages.document()
    assert document.timing is not None
    texts = Parsed.of(plan_page(document)).texts
    for phase in document.memory.phases:
        assert readable(phase.total) in texts
        assert phase.name in texts
    for transfer in document.traffic:
        assert f"{transfer.sent_bytes:,}" in texts
    for group in document.groups:
        assert {group.name, readable(group.shard_bytes)} <= set(texts)
    for words, seconds in document.timing.exposed:
        assert texts[texts.index(f"not overlapped: {words}") + 1] == f"{seconds * 1e3:,.2f}"
    said = " ".join(texts)
    assert f"{document.counted_bytes:,} bytes" in said
    for source in document.machine.sources:
        assert source in said
    for notice in document.notices:
        assert notice.message in said


def test_a_limit_that_is_near_is_drawn(tmp_path: Path) -> None:
    from dataclasses import replace

    document = plan_pages.document()
    page = plan_page(document)
    assert "the device&#x27;s memory" not in page
    assert "the device's memory" not in page
    small = replace(document.machine, memory_bytes=2 * document.memory.peak.total)
    texts = Parsed.of(plan_page(replace(document, machine=small))).texts
    assert "the device's memory" in texts
    assert any("50.0% of the" in text for text in texts)


def test_names_are_escaped() -> None:
    evil = '<img src=x>&"$x_1$'

    bars = Bars("bars", evil, (evil,), (evil,), (Bar(0, 0.0, 1.0, 0),), evil, (2.0, evil))
    plot = Plot("plot", evil, (Series(evil, ((1.0, 2.0),)),), evil, evil)
    blocks = (Text(evil), Items(((evil, evil),)), Table(evil, (evil, "b"), ((evil, evil),)))
    section = Section("evil", evil, (*blocks, bars, plot))
    parsed = Parsed.of(render(evil, evil, [section]))
    assert parsed.count("img") == 0
    # Title, heading, lead, link, section, text, name, item, caption, column, two cells; and, twice
    # each, bars' title, row, legend, limit and axis, and a plot's title, legend and axes.
    assert sum(evil in text for text in parsed.texts) == 12 + 2 * (5 + 4)
    (box,) = (a for tag, a in parsed.tags if a.get("role") == "region")
    assert box["aria-label"] == evil


def test_a_drawing_is_the_same_again() -> None:
    document = plan_pages.document()
    assert plan_page(document) == plan_page(document)


def test_a_run_has_both_sides(pages: dict[str, str]) -> None:
    document = plan_pages.document()
    assert document.timing is not None
    facts = predicted_facts(document, host_counts=True)
    texts = Parsed.of(pages["run"]).texts
    step = texts.index("time of a step (median)")
    predicted = document.timing.step_seconds
    assert texts[step + 1] == f"{predicted * 1e3:,.2f} ms"
    assert texts[step + 2 : step + 4] == ["300.00 ms", f"{0.3 / predicted:.3f}"]
    assert facts.sent_bytes == document.counted_bytes
    sent = texts.index("rank 0: sent in a step")
    assert texts[sent + 2 : sent + 4] == ["1000 B (1,000)", f"{1000 / document.counted_bytes:.3f}"]
    assert texts[texts.index("rank 2: memory") + 1 :][:3] == ["–", "–", "–"]
    assert texts[texts.index("training loss") + 1 :][:3] == ["5.5000", "4.5000", "4.2500"]
    exact = run_page("Run", "", OUTCOME, {0: (document, RankFacts(sent_bytes=1000))})
    texts = Parsed.of(exact).texts
    assert texts[texts.index("rank 0: sent in a step") + 3] == "exact"


def test_a_run_without_a_machine_says_nothing_of_one(pages: dict[str, str]) -> None:
    assert "h100x8" in pages["run"]
    assert "h100x8" not in pages["run without a machine"]
    assert "Traffic by axis" in pages["run without a machine"]
    assert "Traffic by axis" not in pages["run without a plan"]
    assert "H100" not in pages["run without a machine"]


def test_what_rests_on_the_host_counts_where_the_host_computes() -> None:
    pytest.importorskip("polyshard_offload")
    document = plan_pages.document(mesh=parse_mesh("dp=2"), offload="optimizer=host")
    host = sum(document.memory.tiers["host"].values())
    assert host > 0
    on_cpu = predicted_facts(document, host_counts=True).memory_bytes
    on_device = predicted_facts(document, host_counts=False).memory_bytes
    assert on_device == document.memory.peak.total
    assert on_cpu == on_device + host
    assert readable(host) in Parsed.of(plan_page(document)).texts


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    code, text = run("demo:tiny", "--mesh", "dp=2", "--json", "--html", str(path))
    assert code == 0
    total = json.loads(text)["memory"]["phases"][0]["total"]
    assert readable(total) in Parsed.of(path.read_text("utf-8")).texts
    for bad, expected in (
        (tmp_path, f"{tmp_path} is a directory"),
        (tmp_path / "no" / "plan.html", f"there is no directory {tmp_path / 'no'}"),
    ):
        code, text = run("demo:tiny", "--html", str(bad))
        assert code == 2
        assert expected in text.replace("\n", "")
