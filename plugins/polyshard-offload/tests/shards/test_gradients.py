"""Gradients move once a step, and their norm is known before they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import sharded_toy, tokens_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import loss_of

from polyshard import clip_grad_norm_, fully_shard
from polyshard_offload import DiskSettings, Offload, OffloadError
from polyshard_offload.shards.norms import sample_of
from polyshard_testing import ranks

FAR = [("host", "host"), ("host", "disk"), ("disk", "host"), ("disk", "disk")]


def make(tiers: tuple[str, str], path: str, **chosen: Any) -> Offload:
    params, grads = tiers
    disk = DiskSettings(path=Path(path))
    return Offload(params=params, grads=grads, optimizer="disk", disk=disk, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", FAR, ids="-".join)
@ranks(2)
def test_gradients_move_once_a_step(
    rank: int, size: int, tiers: tuple[str, str], tmp_path: Path
) -> None:
    """Shards of gradients that leave the device, by how three micro-batches are added up."""
    path = str(tmp_path)
    offload = make(tiers, path)
    model: Any = sharded_toy(offload)
    groups = len(offload.tiers.storages)
    found: dict[Any, Any] = {}
    for how in ("without sync", "announced", "unannounced"):
        before = offload.tiers.staging.gradient_moves
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last or how != "without sync")
            model.set_is_last_backward(last or how != "announced")
            loss_of(model, tokens_for(micro, rank)).backward()
            if not last:
                moved = offload.tiers.staging.gradient_moves - before
                assert moved == 0 if how != "unannounced" else moved == groups * (micro + 1)
        found[how] = offload.tiers.staging.gradient_moves - before
        gradients = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        found[how, "sums"] = gradients
        for p in model.parameters():
            p.grad = None
    assert found["without sync"] == found["announced"] == groups
    assert found["unannounced"] == 3 * groups
    pairs = zip(found["announced", "sums"], found["unannounced", "sums"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Norms -----------------------------------------------------------------------------------------


def forbid_reading(offload: Offload, model: nn.Module) -> list[torch.Tensor]:
    """Change what rests, uncounted: reading all of it gives another norm."""
    kept = []
    for p in model.parameters():
        if p.grad is not None:
            local = p.grad.to_local()  # type: ignore[attr-defined]
            kept.append(local.clone())
            local.data.fill_(float("nan"))
            sample_of(local.data.view(-1)).copy_(sample_of(kept[-1].view(-1)))  # which is compared
    return kept


def allow_reading(model: nn.Module, kept: list[torch.Tensor]) -> None:
    for p, values in zip((p for p in model.parameters() if p.grad is not None), kept, strict=True):
        p.grad.to_local().data.copy_(values)  # type: ignore[union-attr]


@pytest.mark.parametrize("tiers", [FAR[0], FAR[3]], ids="-".join)
@ranks(2)
def test_norms_are_known_before_the_move(
    rank: int, size: int, tiers: tuple[str, str], tmp_path: Path
) -> None:
    path = str(tmp_path)
    offload = make(tiers, path)
    model: Any = sharded_toy(offload)
    loss_of(model, tokens_for(0, rank)).backward()
    first = offload.grad_norm(model.parameters())  # read: it was not asked for before
    assert torch.equal(first, clip_grad_norm_(model.parameters(), 1e9))
    for p in model.parameters():
        p.grad = None
    loss_of(model, tokens_for(0, rank)).backward()
    kept = forbid_reading(offload, model)
    assert torch.equal(offload.grad_norm(model.parameters()), first)
    assert torch.equal(offload.clip_grad_norm_(model.parameters(), 1e9), first)
    allow_reading(model, kept)
    # Changed gradients are measured again: by clipping, by adding, by the user.
    half = float(first) / 2
    assert torch.equal(offload.clip_grad_norm_(model.parameters(), half), first)
    torch.testing.assert_close(
        float(offload.grad_norm(model.parameters())), half, rtol=1e-5, atol=0
    )  # clipping divides by a little more
    loss_of(model, tokens_for(1, rank)).backward()
    assert torch.equal(
        offload.grad_norm(model.parameters()), clip_grad_norm_(model.parameters(), 1e9)
    )
    model.head.weight.grad.mul_(3)
    assert torch.equal(
        offload.grad_norm(model.parameters()), clip_grad_norm_(model.parameters(), 1e9)
    )
    torch.testing.assert_close(
        offload.grad_norm(model.parameters(), float("inf")),
        clip_grad_norm_(model.parameters(), 1e9, float("inf")),
    )
    for order in (0.0, -1.0, float("-inf")):
        torch.testing.assert_close(
            offload.grad_norm(model.parameters(), order),
            clip_grad_norm_(model.parameters(), 1e9, order),
        )


@ranks(4)
def test_norms_over_mixed_meshes(rank: int, size: int, tmp_path: Path) -> None:
    """Units on two meshes, one of them with replicas, against one process."""
    path = str(tmp_path)
    both = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
    for tiers in (("host", "host"), ("disk", "disk")):
        offload = make(tiers, path)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2))
        inputs = torch.rand(4, 7)
        model(inputs).square().sum().backward()
        expected = nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        model.zero_grad()
        for layer, mesh in zip(model, (both["b"], both, both["a"]), strict=True):
            fully_shard(layer, mesh=mesh, plugins=[offload])
        for _ in range(2):
            model(inputs).square().sum().backward()
            norm = offload.grad_norm(model.parameters())
            torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-5, atol=0)
            model.zero_grad()


@ranks(2)
def test_clipping_by_known_norms_is_clipping(rank: int, size: int, tmp_path: Path) -> None:
    """Clipping by the known norm trains as polyshard's own clipping does."""
    path = str(tmp_path)
    for tiers in (FAR[0], FAR[3]):
        models = []
        for known in (False, True):
            offload = make(tiers, path)
            model = sharded_toy(offload)
            optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
            clip = offload.clip_grad_norm_ if known else clip_grad_norm_
            norms = []
            for step in range(6):
                loss_of(model, tokens_for(step, rank)).backward()
                norms.append(float(clip(model.parameters(), 0.4 if step % 2 else 1e9)))
                optimizer.step()
                optimizer.zero_grad()
            models.append((norms, [p.detach().clone() for p in model.parameters()]))
        assert models[0][0] == models[1][0]
        for a, b in zip(models[0][1], models[1][1], strict=True):
            assert torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]


@ranks(2)
def test_norms_of_spent_gradients_are_known(rank: int, size: int, tmp_path: Path) -> None:
    disk = DiskSettings(path=tmp_path)
    plain: Any = sharded_toy(None)
    for params in ("device", "host", "disk"):
        offload = Offload(params=params, optimizer="disk", disk=disk, step_in_backward=True)
        model: Any = sharded_toy(offload)
        optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for p in plain.parameters():
            p.grad = None
        for one in (plain, model):
            loss_of(one, tokens_for(0, rank)).backward()
        expected = clip_grad_norm_(plain.parameters(), 1e9)
        assert torch.equal(offload.grad_norm(model.parameters()), expected)
        with pytest.raises(OffloadError, match="this gradient is gone"):
            offload.grad_norm(model.parameters(), 1.0)
        with pytest.raises(OffloadError, match="this gradient is gone"):
            offload.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", ["device", "host", "disk"])
@ranks(2)
def test_announced_sums_may_be_stepped_in_backward(
    rank: int, size: int, params: Any, tmp_path: Path
) -> None:
    """Stepping in backward waits for the last micro-batch that is announced."""
    results = []
    for in_backward in (False, True):
        disk = DiskSettings(path=tmp_path)
        offload = Offload(params=params, optimizer="disk", disk=disk, step_in_backward=in_backward)
        model: Any = sharded_toy(offload)
        optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(4):
            for micro in range(3):
                model.set_is_last_backward(micro == 2)
                loss_of(model, tokens_for(10 * step + micro, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@ranks(2)
def test_norms_follow_a_gradient_scaler(rank: int, size: int, tmp_path: Path) -> None:
    """torch does not count what ``unscale_`` writes."""
    offload = make(("host", "host"), str(tmp_path))
    model: Any = sharded_toy(offload)
    optimizer = offload.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_of(model, tokens_for(step, rank))).backward()
        scaler.unscale_(optimizer)
        found = offload.grad_norm(model.parameters())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # another tensor is read
        torch.testing.assert_close(found, offload.grad_norm(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@ranks(2)
def test_clipping_while_parameters_stay_gathered(rank: int, size: int, tmp_path: Path) -> None:
    offload = make(FAR[0], str(tmp_path))
    model: Any = sharded_toy(offload)
    stepped = list(model.parameters())
    model.set_reshard_after_backward(False)
    loss_of(model, tokens_for(0, rank)).backward()
    first = offload.clip_grad_norm_(model.parameters(), 1e9)
    assert float(first) > 0.0
    assert torch.equal(offload.clip_grad_norm_(model.parameters(), float(first) / 2), first)
    torch.testing.assert_close(offload.grad_norm(stepped), first / 2)
