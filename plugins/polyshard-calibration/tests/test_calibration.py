"""Transfers chosen by measured costs: the figures, the file, and what the engine makes of them."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from toy_models import Model, assert_same_parameters, build, shard, tokens_for, train

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import IneffectiveSettingWarning, SettingError
from polyshard.group.transfers import readable, ways_of
from polyshard.plugins.seams import CollectivesBackend, GroupInfo
from polyshard.sharding.layout import ParameterShape, plan_layout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.gloo import GlooTransport
from polyshard_calibration import Calibration
from polyshard_calibration.plugin import _Parameters, apply
from polyshard_calibration.threshold import BreakEven, Timing
from polyshard_testing import World, ranks

KIB = 1 << 10
SMALL = {"width": 24, "hidden": 30, "layers": 2}


def calibrated(staging_bytes: int, world_size: int = 2) -> Calibration:
    return Calibration((BreakEven("gloo-p2p", world_size, staging_bytes, coalesces=False),))


# Figures --------------------------------------------------------------------------------------


def test_packing_holds_up_to_the_last_size_at_which_it_won_clearly() -> None:
    timings = (Timing(4, 1.0, 3.0), Timing(16, 2.0, 3.0), Timing(64, 2.9, 3.0), Timing(256, 9, 3))
    assert BreakEven.of("t", 2, timings).staging_bytes == 32  # 64 won by too little


def test_nothing_is_packed_where_packing_never_won() -> None:
    assert BreakEven.of("t", 2, (Timing(4, 3.0, 1.0), Timing(16, 3.0, 1.0))).staging_bytes == 0


@pytest.mark.parametrize(("coalesced", "expected"), [(0.5, True), (1.5, False), (None, False)])
def test_transfers_are_launched_together_where_that_is_faster(
    coalesced: float | None, expected: bool
) -> None:
    found = BreakEven.of("t", 2, (Timing(4, 0.1, 9.0, 9.0), Timing(16, 9.0, 1.0, coalesced)))
    assert found.coalesces is expected


seconds = st.floats(1e-6, 1.0)


@given(rows=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6))
def test_sizes_at_which_packing_lost_from_there_on_are_not_packed(
    rows: list[tuple[float, float]],
) -> None:
    timings = tuple(Timing(4**i, packed, direct) for i, (packed, direct) in enumerate(rows))
    threshold = BreakEven.of("t", 2, timings).staging_bytes
    lost = [t for t in timings if t.chunk_bytes >= threshold]
    assert all(t.packed >= 0.95 * t.direct for t in lost)
    packed = [t for t in timings if t.chunk_bytes < threshold]
    assert not packed or packed[-1].packed < packed[-1].direct


def measured(rank: int, size: int) -> tuple[str, str]:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    calibration = Calibration.measure(mesh)
    model = shard(build(**SMALL), fully_shard, plugins=[calibration])
    (found,) = calibration.break_evens
    assert (found.transport, found.world_size) == ("gloo-p2p", size)
    sizes = [t.chunk_bytes for t in found.timings]
    assert all(a < b for a, b in pairwise(sizes))
    assert all(t.packed > 0 and t.direct > 0 and t.coalesced is None for t in found.timings)
    assert f"packed below {readable(found.staging_bytes)}, direct" in str(calibration)
    return repr(found.timings), str(describe(model))


def test_every_rank_holds_the_same_figures(world2: World) -> None:
    (first, plan), (second, _) = world2.run(measured)
    assert first == second
    assert "threshold measured with 2 ranks" in plan


def test_a_chunk_has_its_bytes_with_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        (weight, *_) = _Parameters(2, 4 * KIB, torch.device("cpu")).weights
    finally:
        torch.set_default_dtype(before)
    assert weight.nbytes == 2 * 4 * KIB


def measured_replicas(rank: int, size: int) -> str:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    (found,) = Calibration.measure(mesh).break_evens
    assert found.world_size == 2
    return repr(found.timings)


def test_replicas_agree_as_well(world4: World) -> None:
    assert len(set(world4.run(measured_replicas))) == 1


def trained(rank: int, plugin: Plugin) -> tuple[Model, list[float], set[str]]:
    """The model after three steps, its losses, and the ways its parameters travelled."""
    model = shard(build(**SMALL), fully_shard, plugins=[plugin])
    losses = train(model, [tokens_for(step, rank) for step in range(3)]).losses
    return model, losses, {way.kind for plan in describe(model).groups for way in plan.ways}


# Choices --------------------------------------------------------------------------------------


def test_every_choice_has_a_reason() -> None:
    shapes = [
        ParameterShape("large", (64, 1024)),
        ParameterShape("small", (4, 4)),
        ParameterShape("column", (64, 1024), dim=1),
        ParameterShape("scalar", (), dim=None),
    ]
    layout = plan_layout(shapes, 2, 4, 64 * KIB)
    transport = GlooTransport.__new__(GlooTransport)
    kinds = {
        placed.name: (way.kind, way.reason)
        for placed, way in zip(
            layout.parameters, ways_of(layout, transport, has_codec=False), strict=True
        )
    }
    assert kinds == {
        "large": ("direct", "chunks of 64.0 KiB or more"),
        "small": ("packed", "chunks below 64.0 KiB"),
        "column": ("packed", "sharded on dim 1, where chunks interleave"),
        "scalar": ("packed", "every rank holds it whole"),
    }
    assert {w.kind for w in ways_of(layout, transport, has_codec=True)} == {"payload"}
    alone = plan_layout(shapes, 1, 4, 64 * KIB)
    assert {w.kind for w in ways_of(alone, transport, has_codec=False)} == {"in place"}


@ranks(2)
def test_ways_do_not_change_a_bit(rank: int, size: int) -> None:
    """All packed and all direct: the same losses and parameters to the last bit."""
    packed, packed_losses, ways = trained(rank, calibrated(1 << 30))
    assert ways == {"packed"}
    direct, direct_losses, ways = trained(rank, calibrated(0))
    assert ways == {"direct"}
    assert packed_losses == direct_losses
    assert_same_parameters(packed, direct, exact=True)


def other_size(rank: int, size: int) -> str:
    with pytest.warns(IneffectiveSettingWarning, match="nothing for gloo-p2p with 2 ranks"):
        model = shard(build(**SMALL), fully_shard, plugins=[calibrated(123, world_size=7)])
    return str(describe(model))


def test_a_calibration_for_another_size_is_reported(world2: World) -> None:
    (text, _) = world2.run(other_size)
    assert "the calibration has nothing for gloo-p2p with 2 ranks" in text
    assert "threshold built in" in text


class Collectives(Plugin, CollectivesBackend):
    """Collectives where the engine would take point to point, coalesced or one by one."""

    name = "collectives"

    def __init__(self, *, coalesces: bool) -> None:
        self.coalesces = coalesces

    settings = ""

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> Collectives:
        return self

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = CollectiveTransport(roles.shard_group, group.device)
        apply(transport, 0, coalesces=self.coalesces)
        return transport


@ranks(2)
def test_coalesced_collectives_train_alike(rank: int, size: int) -> None:
    together, _, ways = trained(rank, Collectives(coalesces=True))
    assert ways == {"coalesced"}
    apart, _, ways = trained(rank, Collectives(coalesces=False))
    assert ways == {"direct"}
    assert_same_parameters(together, apart, exact=True)


@ranks(2)
def test_it_goes_around_whatever_moves_bytes(rank: int, size: int) -> None:
    """Another plugin's transport gets measured thresholds, and trains to the same bits."""
    other = Collectives(coalesces=False)
    found = BreakEven("gloo-collectives", size, 1 << 30, coalesces=False)
    alone, alone_losses, ways = trained(rank, other)
    assert ways == {"direct"}
    for plugins in ([Calibration((found,)), other], [other, Calibration((found,))]):
        model = shard(build(**SMALL), fully_shard, plugins=plugins)
        losses = train(model, [tokens_for(step, rank) for step in range(3)]).losses
        plans = describe(model).groups
        assert {way.kind for plan in plans for way in plan.ways} == {"packed"}
        assert {p.roles.exclusive["collectives"] for p in plans} == {"measured around collectives"}
        assert losses == alone_losses
        assert_same_parameters(model, alone, exact=True)


# The file -------------------------------------------------------------------------------------


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "transfers.json"
    timings = (Timing(4, 0.125, 0.25, 0.5),)
    saved = Calibration((BreakEven("gloo-p2p", 2, 32, coalesces=True, timings=timings),))
    saved.save(path)
    assert Calibration.load(path).break_evens == saved.break_evens
    assert [p.name for p in tmp_path.iterdir()] == ["transfers.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "transfers.json"
    calibrated(5).save(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        calibrated(6).save(path)
    assert Calibration.load(path).break_evens[0].staging_bytes == 5
    assert [p.name for p in tmp_path.iterdir()] == ["transfers.json"]


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Neither at a name that could be guessed, nor at the file's own."""
    victim, path = tmp_path / "thesis", tmp_path / "transfers.json"
    victim.write_text("irreplaceable")
    path.symlink_to(victim)
    (tmp_path / f"{path.name}.{os.getpid()}.partial").symlink_to(victim)
    calibrated(5).save(path)
    assert victim.read_text() == "irreplaceable"
    assert not path.is_symlink()
    assert Calibration.load(path).break_evens[0].staging_bytes == 5


GOOD = {"transport": "t", "world_size": 2, "staging_bytes": 1, "coalesces": False, "timings": []}
TIMING = {"chunk_bytes": 4, "packed": 0.5, "direct": 1, "coalesced": None}


def holding(**changed: object) -> str:
    return json.dumps({"format": 1, "break_evens": [GOOD, {**GOOD, **changed}]})


def timed(**changed: object) -> str:
    return holding(timings=[TIMING, {**TIMING, **changed}])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read a calibration"),
        ("{", "cannot read a calibration"),
        ("[]", "no calibration of format 1"),
        ('{"format": 9}', r"no calibration of format 1 \(its format: 9\)"),
        ('{"format": true}', r"no calibration of format 1 \(its format: True\)"),
        ('{"format": 1}', "damaged: break_evens is missing"),
        ('{"format": 1, "break_evens": {}}', "damaged: break_evens is an object, not a list"),
        ('{"format": 1, "break_evens": [3]}', r"damaged: break_evens\[0\] is 3, not an object"),
        ("[" * 100_000, "cannot read a calibration"),
        ('{"format": 1, "break_evens": ' + "[" * 100_000, "cannot read a calibration"),
        (" " * (1 << 20) + "{}", "cannot read a calibration.*larger than"),
        ('{"format": ' + "9" * 5000 + "}", "cannot read a calibration"),
        (holding(staging_bytes=-1), r"damaged: break_evens\[1\]\.staging_bytes is -1"),
        (holding(staging_bytes=True), r"break_evens\[1\]\.staging_bytes is True"),
        (holding(staging_bytes=1.0), r"break_evens\[1\]\.staging_bytes is 1\.0"),
        (holding(staging_bytes=10**400), r"staging_bytes is an integer of more than 63 bits"),
        (holding(world_size=0), r"break_evens\[1\]\.world_size is 0"),
        (holding(world_size="2"), r"break_evens\[1\]\.world_size is '2'"),
        (holding(coalesces=1), r"break_evens\[1\]\.coalesces is 1, not true or false"),
        (holding(transport=["t"]), r"break_evens\[1\]\.transport is a list, not a text"),
        (holding(transport=None), r"break_evens\[1\]\.transport is None, not a text"),
        (holding(timings=None), r"break_evens\[1\]\.timings is None, not a list"),
        (holding(timings=[{}]), r"break_evens\[1\]\.timings\[0\]\.chunk_bytes is missing"),
        (timed(packed=float("nan")), "cannot read a calibration.*NaN"),
        (timed(direct=float("-inf")), "cannot read a calibration.*-Infinity"),
        (
            timed(packed=0).replace('"packed": 0,', '"packed": 1e999,'),
            r"timings\[1\]\.packed is inf",
        ),
        (timed(packed=-0.5), r"break_evens\[1\]\.timings\[1\]\.packed is -0\.5"),
        (timed(direct=False), r"timings\[1\]\.direct is False, not a number of seconds"),
        (timed(direct=10**300), r"timings\[1\]\.direct is an integer of more than 63 bits"),
        (timed(coalesced="1"), r"timings\[1\]\.coalesced is '1'"),
        (timed(chunk_bytes=0), r"timings\[1\]\.chunk_bytes is 0"),
        (timed(chunk_bytes="x" * 1000), r"chunk_bytes is 'x{56}\.\.\., not an integer"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "absent",
)
def test_a_bad_file_says_what_to_do(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "transfers.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=complaint + r"[\s\S]*Calibration.measure\(\)") as caught:
        Calibration.load(path)
    assert f"'{path}'" in str(caught.value)
    assert len(str(caught.value)) < 1000
