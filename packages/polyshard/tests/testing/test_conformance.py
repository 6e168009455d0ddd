"""The kit passes sound plugins and fails unsound ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_adapters import Adapting
from toy_codecs import BytesGather, BytesReduce, Codecs, GatherFactory, ReduceFactory
from toy_observers import Watching
from toy_storage import Resting
from toy_transforms import Flattening

from polyshard import Plugin, hookimpl
from polyshard.plugins.stack import build_stack
from polyshard.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard.testing import PluginConformance
from polyshard.testing.kit import Factory


class TestCodecs(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Codecs


class TestStorage(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Resting


class TestTransform(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Flattening


class TestObserver(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Watching


class TestAdapter(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Adapting


class RankDependent(BytesGather):
    """Its payload grows with the rank."""

    def __init__(self, group: GroupInfo, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.payload_bytes += 4 * group.rank


class PeersOnly(BytesGather):
    """Leaves the first row alone, as if the owner knew better."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads[1:], [r[1:] for r in regions])


class Rounding(BytesGather):
    """Loses bits."""

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads, regions)
        for region in regions:
            region.copy_(region.to(torch.bfloat16).float())


class LastWins(BytesReduce):
    """Keeps one rank's gradient instead of the sum."""

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        super().decode_sum(payloads[-1:], outs)


class Unsound(Plugin):
    """A plugin around one unsound codec."""

    name = "unsound"

    def __init__(self, gather: Any = None, reduce: Any = None) -> None:
        self.gather = gather
        self.reduce = reduce

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory | None:
        return _factory(GatherFactory(), self.gather) if self.gather else None

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceFactory | None:
        return _factory(ReduceFactory(), self.reduce) if self.reduce else None


def _factory(factory: Any, make: Any) -> Any:
    factory.bind = make
    return factory


def layout_only(codec: Any) -> Any:
    return lambda group, layout: codec(layout)


@pytest.mark.parametrize(
    ("test", "plugin"),
    [
        ("test_answers_are_the_same_on_every_rank", {"gather": RankDependent}),
        ("test_gather_round_trip", {"gather": layout_only(PeersOnly)}),
        ("test_gather_round_trip", {"gather": layout_only(Rounding)}),
        ("test_reduce_sums_over_ranks", {"reduce": layout_only(LastWins)}),
    ],
    ids=["rank-dependent size", "peers only", "lossy but says exact", "no sum"],
)
def test_the_kit_fails_unsound_codecs(test: str, plugin: dict[str, Any]) -> None:
    kit = PluginConformance()

    def make() -> Unsound:
        return Unsound(**plugin)

    takes_factory = test == "test_answers_are_the_same_on_every_rank"
    argument = make if takes_factory else build_stack([make()])
    with pytest.raises(AssertionError):
        getattr(kit, test)(argument)


def test_a_tolerance_admits_what_it_says() -> None:
    class Tolerant(PluginConformance):
        tolerance = 2.0**-8

    Tolerant().test_gather_round_trip(build_stack([Unsound(gather=layout_only(Rounding))]))


def test_forgetting_the_fixture_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from polyshard.testing import PluginConformance

        class TestForgetful(PluginConformance):
            pass
        """
    )
    result = pytester.runpytest("-k", "clean", "-p", "polyshard.testing.fixtures")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestForgetful must override the fixture 'factory'*"])
