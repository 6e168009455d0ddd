"""One table of exclusive hooks: a row is all that claims, plans and the reference need."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytest
from torch import nn
from toy_groups import GROUP

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins import contributions, hookspecs
from polyshard.plugins.contract import hookspec
from polyshard.plugins.contributions import ROLES, Role
from polyshard.plugins.seams import GroupInfo, Named
from polyshard.plugins.stack import build_stack
from polyshard.plugins.validation import hook_arguments
from polyshard_testing import World


class Landing(Named):
    """A seam that does not exist: where a gradient lands."""

    @abstractmethod
    def owner(self, group: GroupInfo) -> int:
        """A rank."""


class OnTheShard(Landing):
    name = "on the shard"

    def owner(self, group: GroupInfo) -> int:
        return group.rank


class OnOneRank(Landing):
    name, settings = "on one rank", "rank 0"
    notices = ("gradients land on rank 0",)

    def owner(self, group: GroupInfo) -> int:
        return 0


LANDING = Role[Landing]("polyshard_landing", Landing, "gradient landing", OnTheShard)


@hookspec
def polyshard_landing(group: GroupInfo) -> Landing | None:
    """Decide where a gradient of ``group`` lands."""
    raise NotImplementedError


class Lander(Plugin):
    name = "lander"

    @hookimpl
    def polyshard_landing(self, group: GroupInfo) -> Landing | None:
        return OnOneRank()


class Rival(Lander):
    name = "rival"


class Confused(Plugin):
    name = "confused"

    @hookimpl
    def polyshard_landing(self, group: GroupInfo) -> Any:
        return "rank 0"


def add_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exclusive hook takes to add: its specification, and its row."""
    monkeypatch.setattr(hookspecs, "polyshard_landing", polyshard_landing, raising=False)
    hook_arguments.cache_clear()
    monkeypatch.setattr(contributions, "ROLES", (*ROLES, LANDING))


@pytest.fixture
def new_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    add_row(monkeypatch)
    yield
    hook_arguments.cache_clear()


@pytest.mark.usefixtures("new_row")
def test_a_new_row_is_claimed() -> None:
    assert build_stack([]).contributions(GROUP)[LANDING].name == "on the shard"
    found = build_stack([Lander()]).contributions(GROUP)
    assert found[LANDING].owner(GROUP) == 0
    assert found.plugin_of(found[LANDING]) == "plugin 'lander' (0)"
    assert found.notices == ("gradients land on rank 0",)


@pytest.mark.usefixtures("new_row")
def test_a_new_row_is_refused_when_two_claim_it() -> None:
    both = build_stack([Rival(), Lander()])
    expected = r"'lander' \(0\) and 'rival' \(0\) both claim the gradient landing of group 'block'"
    with pytest.raises(ConflictError, match=expected):
        both.contributions(GROUP)


@pytest.mark.usefixtures("new_row")
def test_answers_to_a_new_row_are_checked() -> None:
    with pytest.raises(PluginError, match=r"polyshard_landing returned a str, which is no Landing"):
        build_stack([Confused()]).contributions(GROUP)


@pytest.mark.usefixtures("new_row")
def test_a_new_row_is_in_the_reference() -> None:
    from make_hook_docs import PAGE, files

    page = files()[PAGE]
    assert "| gradient landing | [polyshard_landing](#polyshard_landing) | [Landing]" in page
    assert "## polyshard_landing\n\n`polyshard_landing(group)`" in page


def planned(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_row(monkeypatch)
        model = fully_shard(nn.Linear(2, 2), plugins=[Lander()])
        plan = describe(model)
        assert "gradient landing on one rank(rank 0)" in str(plan)
        assert any("gradient landing on one" in line for line in plan.groups[0].shared_lines())
    hook_arguments.cache_clear()


def test_ranks_compare_what_takes_a_new_row(world1: World) -> None:
    world1.run(planned)


def test_rows_name_hooks_that_exist_and_answers_that_fit() -> None:
    assert len({role.name for role in ROLES}) == len(ROLES)
    for role in ROLES:
        assert hook_arguments()[role.hook] == ("group",)
        assert isinstance(role.engine(), role.seam)
