"""A format that the plugin does not know: one class and one entry are all it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from quantized_models import Oracle, build, one_hop, shard, tokens_for, train
from torch import Tensor
from toy_models import loss_of
from typing_extensions import override

from polyshard import describe, stats
from polyshard.errors import SettingError
from polyshard_quantized import (
    BlockFormat,
    Exclusions,
    QuantizedComm,
    format_named,
    format_names,
    round_trip,
)
from polyshard_quantized.formats import registry
from polyshard_quantized.formats.base import Coder
from polyshard_quantized.workspace import Workspace
from polyshard_testing import PluginConformance, World
from polyshard_testing.runs import Factory


@dataclass(frozen=True)
class Six(BlockFormat):
    """6-bit integers in [-31, 31]: a width and a packing that no other format has."""

    block_elements: int = 32
    name: ClassVar[str] = "six"
    largest_code: ClassVar[float] = 31.0
    bits: ClassVar[int] = 6
    error_bound: ClassVar[float] = 1 / 62
    needs_feedback: ClassVar[bool] = True

    @override
    def code_bytes(self, elements: int) -> int:
        return -(-elements // 2) - (-elements // 4)

    @override
    def coder(self, workspace: Workspace) -> Coder:
        return SixCoder()


class SixCoder(Coder):
    """Low halves of a code two a byte, then its high quarters four a byte."""

    @override
    def store(self, values: Tensor, codes: Tensor) -> None:
        found = (values + 32).to(torch.uint8)
        codes.zero_()
        for part, per_byte, width, shift in self._planes(codes, found.shape[-1]):
            for place in range(per_byte):
                mine = found[..., place::per_byte] >> shift & (1 << width) - 1
                part[..., : mine.shape[-1]] += mine << width * place

    @override
    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.fill_(-32.0)
        for part, per_byte, width, shift in self._planes(codes, out.shape[-1]):
            for place in range(per_byte):
                mine = out[..., place::per_byte]
                bits = part[..., : mine.shape[-1]] >> width * place & (1 << width) - 1
                mine.add_(bits, alpha=1 << shift)
        out.mul_(scales)

    @staticmethod
    def _planes(codes: Tensor, size: int) -> list[tuple[Tensor, int, int, int]]:
        low = -(-size // 2)
        return [(codes[..., :low], 2, 4, 0), (codes[..., low:], 4, 2, 4)]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line that a file in ``formats/`` would add."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, Six))


def by_hand(values: Tensor, size: int) -> Tensor:
    """Blocks of ``size``: multiples of a 31st of the largest value, cut to 17 bits."""
    blocks = values.view(-1, size)
    scale = blocks.abs().amax(1, keepdim=True) / 31
    scale = (scale.view(torch.int32) & ~0x7F).view(torch.float32)
    return ((blocks / scale).round() * scale).view(values.shape)


def test_values_are_those_computed_by_hand() -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    found = round_trip(values, Six())
    assert torch.equal(found, by_hand(values, 32))
    error = (found - values).view(-1, 32).abs().amax(1)
    largest = values.view(-1, 32).abs().amax(1)
    assert bool((error <= largest * (Six.error_bound + 2**-16)).all())


class TestSix(PluginConformance):
    kept_share = 3.5  # the workspace, which all groups share

    tolerance = 1.1 * Six.error_bound

    @pytest.fixture
    def factory(self) -> Factory:
        everything = Exclusions(min_ndim=0, min_numel=0)
        form = Six()
        return partial(QuantizedComm, weights=form, gradients=form, exclude=everything)


def trained(rank: int, size: int) -> None:
    """As one process that rounds what travels; bytes and lines are those of the format."""
    form = Six()
    plugin = QuantizedComm(weights=form, gradients=form)
    model = shard(build(), [plugin])
    found = train(model, rank)
    expected = Oracle(size, form, one_hop(form)).train(build(), rank)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
    assert "weights Six(block_elements=32)" in str(describe(model))
    before = stats(model).bytes_sent
    loss_of(model, tokens_for(9, rank)).backward()
    assert stats(model).bytes_sent - before == describe(model).step_bytes
    (root,) = (g for g in plugin.report().groups if g.name == "(root)")
    assert root.gather is not None
    assert root.gather.format == form
    # 6 bits a value and 4 bytes for each 32 of them, beside fp32; the rest is alignment.
    assert 0.218 < root.gather.wire_bytes / root.gather.native_bytes < 0.225


def test_training_and_report(world2: World) -> None:
    world2.run(trained)


def test_names_are_those_of_the_registry(registered: None) -> None:
    assert format_names()[-1] == "six"
    assert format_named("six") == Six()


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"'six'; choose one of int8, e4m3, int4\."):
        format_named("six")


def test_every_format_keeps_the_bound_it_declares(registered: None) -> None:
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    for name in format_names():
        form = format_named(name)
        size = form.block_elements
        error = (round_trip(values, form) - values).view(-1, size).abs().amax(1)
        largest = values.view(-1, size).abs().amax(1)
        worst = float((error / largest).max())
        assert form.error_bound / 4 < worst <= form.error_bound + 2**-16, name


def test_commands_take_it_by_name(registered: None) -> None:
    plugins: Any = pytest.importorskip("polyshard_cli.plan.request.plugins")
    plugin = plugins.quantizing("int8,six")
    assert plugin.gradients == Six()
    assert plugin.error_feedback is not None
    with pytest.raises(ValueError, match="Known: int8, e4m3, int4, six, native"):
        plugins.quantizing("int9")
