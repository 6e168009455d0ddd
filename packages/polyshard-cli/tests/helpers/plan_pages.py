"""Pages for tests, and what a parser finds in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from typing_extensions import override

from polyshard_cli.plan import Document, Open, Settings, draft, parse_mesh, tune
from polyshard_cli.plan.report.outcome import Outcome, RankFacts, predicted_facts, run_page
from polyshard_cli.plan.report.sections import plan_page
from polyshard_cli.plan.tuning.sections import tuning_page

VOID = {"meta", "link", "br", "hr", "img", "input"}
OUTCOME = Outcome(
    ranks=(RankFacts(30 << 20, 1000), RankFacts(31 << 20, None), RankFacts()),
    step_seconds=(0.5, 0.1, 0.3),
    losses=((1, 5.5), (2, 4.25), (3, 4.5)),
    held_out=((3, 4.375),),
    notes=("How it was counted.",),
)


@dataclass
class Parsed(HTMLParser):
    """A page as a parser that forgives nothing sees it."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @staticmethod
    def of(page: str) -> Parsed:
        """What is in ``page``, whose every element is closed."""
        parsed = Parsed()
        parsed.feed(page)
        parsed.close()
        assert not parsed.open
        return parsed

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def document(**chosen: object) -> Document:
    """A plan of the demonstration."""
    settings = {"model": "demo:tiny", "mesh": parse_mesh("replicate=2,dp=2"), **chosen}
    return draft(Settings(**settings))  # type: ignore[arg-type]


def pages() -> dict[str, str]:
    """One of each kind."""
    planned = document()
    search = Settings(model="demo:tiny", mesh=parse_mesh("dp=4"), batch=8)
    alone = document(mesh=parse_mesh("dp=1"))
    unknown = document(model="plan_models:Pair", mesh=parse_mesh("dp=2"))
    plans = {0: (planned, predicted_facts(planned, host_counts=True))}
    return {
        "tuned": tuning_page(tune(search, Open(), 4 << 20), search),
        "alone": plan_page(alone),
        "not run": plan_page(unknown),
        "run": run_page("Run", "A lead.", OUTCOME, plans, is_timed=True),
        "run without a machine": run_page("Run", "A lead.", OUTCOME, plans),
        "run without a plan": run_page("Run", "A lead.", OUTCOME, {}),
    }
