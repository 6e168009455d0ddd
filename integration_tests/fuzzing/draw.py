"""Random cases. A case is drawn from its seed and number alone, so any can be drawn again.

[Note: why not Hypothesis]
A case takes a good part of a second on four ranks, a failing one may take them down or hang them,
and a session should continue after a finding. That wants cases that are numbered, and a shrinker
that knows what is dear (``shrink.py``); Hypothesis's repeats a hang hundreds of times.
"""

from __future__ import annotations

from random import Random

from fuzzing.build import KINDS, OPTIMIZERS, PLACEMENTS
from fuzzing.case import (
    Action,
    ByHand,
    Case,
    Clip,
    Evaluate,
    Fail,
    Leaf,
    Mesh,
    Offloaded,
    Policy,
    Quantized,
    Save,
    Step,
    Train,
    Tree,
    Unit,
    Write,
    Zero,
)
from fuzzing.saving import WAYS, WRITES

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (2,),
    (3,),
    (5,),
    (0,),
    (0, 3),
    (3, 0),
    (1, 4),
    (4, 1),
    (2, 3),
    (5, 3),
    (3, 2, 2),
    (1, 1, 1),
    (4, 4),
    (7, 5),
    (2, 0, 3),
    (33,),
    (8, 6),
    (64, 48),
)
FLOATS = ("float32", "bfloat16", "float16", "float64")
TIERS = (
    ("device", "device", "host"),
    ("device", "device", "disk"),
    ("host", "host", "host"),
    ("host", "host", "disk"),
    ("host", "disk", "disk"),
    ("disk", "host", "host"),
    ("disk", "host", "disk"),
    ("disk", "disk", "disk"),
    ("device", "device", "device"),
)
MESHES = (
    Mesh(1),
    Mesh(2),
    Mesh(2),
    Mesh(3),
    Mesh(4),
    Mesh(2, replicas=2),
    Mesh(1, replicas=2),
    Mesh(2, replicas=1),
    Mesh(1, replicas=3),
    Mesh(4, replicas=1),
)
TENSOR_MESHES = (
    Mesh(2, tensor=2),
    Mesh(1, tensor=2),
    Mesh(2, tensor=1),
    Mesh(1, replicas=2, tensor=2),
    Mesh(2, replicas=1, tensor=2),
    Mesh(1, tensor=4),
)


def draw(seed: int, number: int) -> Case:
    """The case of that number in the session of that seed."""
    return _Draw(Random(f"{seed}/{number}")).case(number)


class _Draw:
    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.plain = dice.random() < 0.4
        """Float32 throughout: what differs then is no rounding."""

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def case(self, number: int) -> Case:
        dice = self.dice
        mesh = dice.choice(TENSOR_MESHES if self.chance(0.25) else MESHES)
        tree = self.tree(mesh, depth=0)
        return Case(
            tree=tree,
            width=dice.choice((1, 2, 3, 4, 5, 8, 16)),
            mesh=mesh,
            quantized=self.quantized() if self.chance(0.25) else None,
            offload=self.offloaded() if self.chance(0.25) else None,
            optimizer=dice.choice(list(OPTIMIZERS)),
            input_grad=self.chance(0.3),
            meta=self.chance(0.1),
            prefetch=dice.randrange(1, 1000) if self.chance(0.15) else 0,
            script=self.script(mesh),
            seed=number,
        )

    # Models -----------------------------------------------------------------------------------

    def tree(self, mesh: Mesh, depth: int) -> Tree:
        dice = self.dice
        count = dice.choice((1, 2, 2, 3, 3, 4))
        children: list[Leaf | Tree] = []
        for _ in range(count):
            nested = depth < 2 and self.chance(0.25)
            children.append(self.tree(mesh, depth + 1) if nested else self.leaf(mesh))
        is_unit = depth == 0 or self.chance(0.5)
        return Tree(
            children=tuple(children),
            unit=self.unit(mesh) if is_unit else None,
            listed=depth > 0 and is_unit and self.chance(0.25),
            checkpoint=dice.choice(("reentrant", "plain")) if self.chance(0.15) else "",
        )

    def leaf(self, mesh: Mesh) -> Leaf:
        dice = self.dice
        kind = dice.choice(list(KINDS))
        shapes: tuple[tuple[int, ...], ...] = ()
        if kind == "raw":
            shapes = tuple(dice.choice(SHAPES) for _ in range(dice.randint(1, 4)))
        count = 2 if self.chance(0.3) else 1
        dtypes = tuple(dice.choice(FLOATS) for _ in range(count))
        if self.plain or self.chance(0.5):
            dtypes = ("float32",)
        if kind == "raw" and self.chance(0.15):
            dtypes = (*dtypes, dice.choice(("int64", "int32", "uint8", "bool")))
        return Leaf(
            kind=kind,
            size=dice.choice((1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 2048 if self.chance(0.3) else 7)),
            shapes=shapes,
            dtypes=dtypes,
            frozen=dice.choice(("first", "all")) if self.chance(0.2) else "",
            used=dice.choice(("even", "never")) if self.chance(0.2) else "always",
            unit=self.unit(mesh) if self.chance(0.3) else None,
        )

    def unit(self, mesh: Mesh) -> Unit:
        dice = self.dice
        reshards: list[bool | int | None] = [None, None, True, False]
        if mesh.shards == 4:
            reshards += [2, 2]
        placement = "rows" if self.chance(0.6) else dice.choice(list(PLACEMENTS))
        return Unit(reshard=dice.choice(reshards), placement=placement, policy=self.policy())

    def policy(self) -> Policy:
        dice = self.dice
        if self.plain or self.chance(0.5):
            return Policy()
        return Policy(
            param=dice.choice((None, "bfloat16", "float16", "float32")),
            reduce=dice.choice((None, None, "float32", "bfloat16")),
            output=dice.choice((None, None, "float32", "bfloat16")),
            cast_inputs=self.chance(0.8),
        )

    # Plugins ----------------------------------------------------------------------------------

    def quantized(self) -> Quantized:
        dice = self.dice

        def form() -> tuple[str, int] | None:
            name = dice.choice(("int8", "int8", "float8", "int4"))
            return (name, dice.choice((8, 16, 64, 256))) if self.chance(0.7) else None

        weights, gradients = form(), form()
        if weights is None and gradients is None:
            weights = ("int8", 256)
        whole = gradients is not None and gradients[0] != "float8"
        return Quantized(
            weights=weights,
            gradients=gradients,
            min_ndim=dice.choice((0, 1, 2)),
            min_numel=dice.choice((0, 0, 16, 4096)),
            stochastic=whole and self.chance(0.2),
            hierarchical=self.chance(0.7),
        )

    def offloaded(self) -> Offloaded:
        dice = self.dice
        params, grads, optimizer = dice.choice(TIERS)
        return Offloaded(
            params=params,
            grads=grads,
            optimizer=optimizer,
            fraction=dice.choice((1.0, 1.0, 0.5, 0.0)),
            prefetch=dice.choice((0, 1, 2, 5)),
            chunk_bytes=dice.choice((64, 2000, 1 << 20)),
            checksums=self.chance(0.4),
        )

    # Scripts ----------------------------------------------------------------------------------

    def script(self, mesh: Mesh) -> tuple[Action, ...]:
        actions: list[Action] = []
        for _ in range(self.dice.randint(1, 4)):
            actions += self.between(0.3)
            for _ in range(self.dice.choice((0, 0, 0, 1, 2))):
                actions.append(self.micro(mesh, last=False))
                actions += self.between(0.2)
            actions.append(self.micro(mesh, last=True))
            if self.chance(0.4):
                norm = self.dice.choice((1.0, 2.0, 2.0, float("inf")))
                actions.append(Clip(self.dice.choice((0.01, 0.1, 100.0)), norm))
            actions += self.between(0.2)
            actions.append(Step())
            if self.chance(0.9):
                actions.append(Zero(to_none=self.chance(0.7)))
        actions += self.between(0.3)
        return tuple(actions)

    def micro(self, mesh: Mesh, *, last: bool) -> Train:
        return Train(
            sync=last or self.chance(0.4),
            all_reduce=last or not mesh.replicas or self.chance(0.5),
            keep=self.chance(0.15 if last else 0.3),
            forwards=2 if self.chance(0.15) else 1,
            joint=self.chance(0.5),
        )

    def between(self, probability: float) -> list[Action]:
        if not self.chance(probability):
            return []
        dice = self.dice
        kinds = (
            Evaluate(inference=self.chance(0.3), training=self.chance(0.3)),
            Save(dice.choice(list(WAYS))),
            Write(dice.choice(list(WRITES))),
            ByHand(dice.randrange(6), self.chance(0.5), self.chance(0.5)),
            Fail(self.chance(0.5)),
        )
        return [dice.choice(kinds), *self.between(0.3)]
