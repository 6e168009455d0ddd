"""Parameters shared between units beside plugins, against the same stack with ties in one unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from tp_models import loss_of, meshes, tiny, tokens_for

from polyshard import clip_grad_norm_, fully_shard
from polyshard_offload import Offload
from polyshard_optimizers import MatrixOptimizer
from polyshard_quantized import Exclusions, Int8Block, QuantizedComm
from polyshard_tensor_parallel import TensorParallel, demo_plan
from polyshard_testing import World, ranks

STEPS, MICRO = 3, 2


@dataclass(frozen=True)
class Stack:
    """Plugins on four ranks."""

    tp: int = 1
    host: bool = False
    quantized: bool = False
    muon: bool = False

    def mesh(self) -> DeviceMesh:
        return meshes(4 // self.tp, self.tp)

    def plugins(self, mesh: DeviceMesh) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.tp > 1:
            found["tp"] = TensorParallel(demo_plan(), mesh=mesh["tp"])
        if self.host:
            found["offload"] = Offload(params="host", optimizer="host")
        if self.quantized:
            everything = Exclusions(min_numel=0)
            found["quantized"] = QuantizedComm(gradients=Int8Block(64), exclude=everything)
        if self.muon:
            muon = partial(MatrixOptimizer, torch.optim.Muon, lr=0.02)
            found["muon"] = muon(gradients="rows") if self.quantized else muon()
        return found


STACKS = {
    "tp": Stack(tp=2),
    "host": Stack(host=True),
    "quantized": Stack(quantized=True),
    "muon": Stack(muon=True),
    "tp, host": Stack(tp=2, host=True),
    "tp, quantized, host": Stack(tp=2, quantized=True, host=True),
    "tp, muon": Stack(tp=2, muon=True),
    "quantized, muon": Stack(quantized=True, muon=True),
}


def model_of(device: str = "") -> Any:
    """The head is the embedding, and two blocks have one matrix in common."""
    with torch.device(device or torch.get_default_device()):
        model: Any = tiny(tied=True)
    model.blocks[1].feed_forward.up.weight = model.blocks[0].feed_forward.up.weight
    return model


def inside(model: Any, **given: Any) -> Any:
    """Each tie within one unit."""
    fully_shard(list(model.blocks), **given)
    return fully_shard(model, **given)


def across(model: Any, **given: Any) -> Any:
    """Each user a unit."""
    for module in (model.embedding, *model.blocks, model.head):
        fully_shard(module, **given)
    return fully_shard(model, **given)


def are_tied(model: Any) -> bool:
    one, other = (block.feed_forward.up.weight for block in model.blocks)
    return model.head.weight is model.embedding.weight and one is other


class Steps:
    """Optimizers of a stack as one."""

    def __init__(self, model: Any, plugins: dict[str, Any]) -> None:
        muon = plugins.get("muon")
        rest = model.parameters() if muon is None else muon.rest(model)
        adam: Any = torch.optim.AdamW(rest, lr=1e-2, foreach=False)
        if "offload" in plugins:
            adam = plugins["offload"].wrap(adam)
        self.all: list[Any] = [adam] if muon is None else [adam, muon.optimizer(model)]

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()
            optimizer.zero_grad()


def trained(model: Any, plugins: dict[str, Any], part: int) -> list[float]:
    optimizer, told = Steps(model, plugins), []
    # Norms are summed where matrices landed, and Muon makes much of the last bit.
    most = float("inf") if "muon" in plugins else 0.5
    for step in range(STEPS):
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            loss = loss_of(model, tokens_for(MICRO * step + micro, part)) / MICRO
            loss.backward()
            told.append(float(loss.detach()))
        told.append(float(full(clip_grad_norm_(model.parameters(), most))))
        optimizer.step()
    return told


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p) for n, p in model.named_parameters(remove_duplicate=False)}


def built(stack: Stack, sharded: Callable[..., Any], device: str = "") -> Any:
    mesh = stack.mesh()
    plugins = stack.plugins(mesh)
    model = model_of(device)
    if "tp" in plugins:
        plugins["tp"].apply(model)
    return sharded(model, mesh=mesh["dp"], plugins=list(plugins.values())), plugins


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", STACKS)
@ranks(4)
def test_the_same_training_as_inside_one_unit(rank: int, size: int, name: str) -> None:
    stack = STACKS[name]
    found = []
    for sharded in (across, inside):
        model, plugins = built(stack, sharded)
        found.append((trained(model, plugins, rank // stack.tp), values(model)))
        assert are_tied(model)
    (losses, weights), (expected, others) = found
    most = 0.02 if stack.quantized else 0.0  # blocks of what is sent lie otherwise
    of_norms = max(most, 1e-6) if stack.muon else most
    torch.testing.assert_close(losses, expected, rtol=of_norms, atol=of_norms)
    for key, value in others.items():
        torch.testing.assert_close(weights[key], value, msg=key, rtol=most, atol=most)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by unit"])
@pytest.mark.parametrize("name", ["tp", "host", "muon", "tp, host"])
@ranks(4)
def test_it_is_tied_after_to_empty(rank: int, size: int, name: str, whole: bool) -> None:
    stack = STACKS[name]
    reference, others = built(stack, across)
    model, plugins = built(stack, across, "meta")
    for module in [model] if whole else [model.embedding, model.head, *model.blocks, model]:
        module.to_empty(device=torch.get_default_device())
    assert are_tied(model)
    for key, buffer in model.named_buffers():
        buffer.copy_(reference.get_buffer(key))
    model.load_state_dict(reference.state_dict())
    part = rank // stack.tp
    assert trained(model, plugins, part) == trained(reference, others, part)
    assert are_tied(model)
    for key, value in values(reference).items():
        assert torch.equal(values(model)[key], value), key


@dataclass(frozen=True)
class Pretrained:
    """A tied Llama, whose embedding and head are units."""

    tp: int = 1
    host: bool = False

    def fill(self, folder: Path, out: Path) -> tuple[dict[str, Tensor], Any, Any]:
        from pretrained_models import ARCHITECTURES

        from polyshard_checkpoint import load_pretrained, save_pretrained
        from polyshard_tensor_parallel import llama_plan

        mesh = meshes(4 // self.tp, self.tp)
        model = ARCHITECTURES["Llama"].on_meta(folder)
        plugins: list[Any] = []
        if self.tp > 1:
            plugins.append(TensorParallel(llama_plan(), mesh=mesh["tp"]))
            plugins[0].apply(model)
        if self.host:
            plugins.append(Offload(params="host", optimizer="host"))
        for module in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh["dp"], plugins=plugins)
        load_pretrained(model, folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        held = values(model)
        save_pretrained(model, out)
        return held, model, plugins[-1].wrap if self.host else None


PRETRAINED = {"plain": Pretrained(), "tp": Pretrained(tp=2), "host": Pretrained(host=True)}


def filled(
    rank: int, size: int, name: str, base: Path, out: Path
) -> tuple[dict[str, Tensor], int, list[float]]:
    from pretrained_models import ARCHITECTURES, train

    case = PRETRAINED[name]
    held, model, wrap = case.fill(base, out)
    place = rank // case.tp
    return held, place, train(model, ARCHITECTURES["Llama"], place, 4 // case.tp, wrap)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRETRAINED)
@pytest.mark.filterwarnings("ignore")
def test_files_fill_it_once(world4: World, name: str, tmp_path: Path) -> None:
    """What is loaded is in the files, what is saved is the same bytes, and losses are those of one
    process.
    """
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    from pretrained_models import ARCHITECTURES, train

    llama, base, out = ARCHITECTURES["Llama"], tmp_path / "base", tmp_path / "out"
    llama.build(tied=True).save_pretrained(base)
    alone: Any = transformers.LlamaForCausalLM.from_pretrained(base)
    wanted = {n: p.detach().clone() for n, p in alone.named_parameters(remove_duplicate=False)}
    found = world4.run(filled, name, base, out, timeout=200.0)
    for held, *_ in found:
        assert held.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(held[key], value), key
    files = [{p.name: p.read_bytes() for p in f.glob("*.safetensors*")} for f in (base, out)]
    assert files[0] == files[1]
    losses = torch.tensor(list({place: each for _, place, each in found}.values())).mean(0)
    torch.testing.assert_close(losses, torch.tensor(train(alone, llama)), rtol=1e-4, atol=1e-4)
