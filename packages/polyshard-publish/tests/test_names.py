"""Names and parts: split, fused, stacked and apart, tied; and mistakes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from publish_runs import receiving
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard.errors import SettingError
from polyshard_publish import Part, Publisher
from polyshard_publish.pieces import Names
from polyshard_testing import World

WIDTH, HEADS, EXPERTS, INNER = 6, 5, 4, 3


class Fused(nn.Module):
    """One projection for queries, keys and values; experts stacked, their gate and up fused."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))


class Apart(nn.Module):
    """The same with a tensor for each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS) for _ in range(3))
        experts: Any = [
            nn.ModuleDict({n: nn.Linear(WIDTH, INNER, bias=False) for n in ("gate", "up")})
            for _ in range(EXPERTS)
        ]
        self.experts = nn.ModuleList(experts)
        self.downs = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(EXPERTS))


def split(name: str) -> str | list[Part]:
    """From the fused model's names to those of the other."""
    if name.startswith("qkv"):
        kind = name.partition(".")[2]
        return [
            Part(f"{one}.{kind}", take=(slice(i * HEADS, (i + 1) * HEADS),))
            for i, one in enumerate("qkv")
        ]
    if name == "gate_up":
        return [
            Part(f"experts.{e}.{one}.weight", take=(e, slice(i * INNER, (i + 1) * INNER)))
            for e in range(EXPERTS)
            for i, one in enumerate(("gate", "up"))
        ]
    return [Part(f"downs.{e}.weight", take=(e,)) for e in range(EXPERTS)]


def joined(name: str) -> list[Part]:
    """The other way."""
    words = name.split(".")
    if words[0] in "qkv":
        at = "qkv".index(words[0]) * HEADS
        shape = (3 * HEADS, WIDTH) if words[1] == "weight" else (3 * HEADS,)
        return [Part(f"qkv.{words[1]}", place=(slice(at, at + HEADS),), shape=shape)]
    expert = int(words[1])
    if words[0] == "downs":
        return [Part("down", place=(expert,), shape=(EXPERTS, WIDTH, INNER))]
    at = INNER * (words[2] == "up")
    place = (expert, slice(at, at + INNER))
    return [Part("gate_up", place=place, shape=(EXPERTS, 2 * INNER, WIDTH))]


def by_hand(fused: Fused) -> dict[str, Tensor]:
    """The tensors of the model that is apart."""
    found = {}
    for i, one in enumerate("qkv"):
        rows = slice(i * HEADS, (i + 1) * HEADS)
        found[f"{one}.weight"], found[f"{one}.bias"] = fused.qkv.weight[rows], fused.qkv.bias[rows]
    for e in range(EXPERTS):
        found[f"experts.{e}.gate.weight"] = fused.gate_up[e, :INNER]
        found[f"experts.{e}.up.weight"] = fused.gate_up[e, INNER:]
        found[f"downs.{e}.weight"] = fused.down[e]
    return {name: value.detach().clone() for name, value in found.items()}


def publishes(rank: int, size: int, address: str, kind: str) -> None:
    torch.manual_seed(0)
    fused = Fused()
    if kind == "split":
        model: nn.Module = fused
        names: Names = split
    else:
        model, names = Apart(), joined
        model.load_state_dict(by_hand(fused))
    fully_shard(model)
    with Publisher(model, to=address, names=names, keep="values") as publisher:
        publisher.publish(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        assert publisher.publish(2).patched == (address,)


@pytest.mark.parametrize("kind", ["split", "joined"])
def test_parts_arrive_where_they_belong(world2: World, world3: World, kind: str) -> None:
    torch.manual_seed(0)
    fused = Fused()
    wanted = by_hand(fused) if kind == "split" else fused.state_dict()
    for world in (world2, world3):
        with receiving() as (receiver, address):
            world.run(publishes, address, kind)
            with receiver.serving() as served:
                assert served.tensors.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert torch.equal(served.tensors[name], 2 * tensor), name


def test_dtypes_by_name() -> None:
    model = nn.ModuleDict({"router": nn.Linear(4, 2), "expert": nn.Linear(4, 4)})
    publisher = Publisher(
        model, to="x:1", dtype=lambda name: None if "router" in name else torch.bfloat16
    )
    found = {name: entry.dtype for name, entry in publisher.catalogue.items()}
    assert set(found.values()) == {"F32", "BF16"}
    assert all((dtype == "F32") == ("router" in name) for name, dtype in found.items())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda _: None, "nothing to publish"),
        (lambda _: "same", r"names= (makes|gives elements of) 'same'"),
        (lambda n: [Part(n, take=(slice(0, 9),))], r"no range within a dim of"),
        (lambda n: [Part(n, take=(0, 0, 0))], "which has"),
        (lambda n: [Part(n, place=(0,))], "give its shape= too"),
        (lambda n: [Part(n, place=(0,), shape=(2, 9))], "has room for"),
        (lambda n: [Part(n, take=(slice(0, 1),), place=(slice(0, 1),), shape=(2, 3))]
            if n == "weight" else n, r"fills 3 of the 6 elements of 'weight'"),
    ],
)  # fmt: skip
def test_mistakes_in_names(names: Callable[[str], Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Publisher(nn.Linear(3, 2), to="x:1", names=names)
