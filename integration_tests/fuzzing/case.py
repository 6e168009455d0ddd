"""What a case is: plain data whose ``repr`` is the Python that makes it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


class Short:
    """A ``repr`` that leaves out what has its default value: failing cases are read by people."""

    def __repr__(self) -> str:
        parts = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Policy(Short):
    """A ``MixedPrecisionPolicy``; dtypes by name."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True


@dataclass(frozen=True, repr=False)
class Unit(Short):
    """Keywords of one ``fully_shard`` call.

    ``placement`` names a function of ``build.PLACEMENTS``.
    """

    reshard: bool | int | None = None
    placement: str = "rows"
    policy: Policy = Policy()


@dataclass(frozen=True, repr=False)
class Leaf(Short):
    """A module with parameters that keeps the width of what it gets.

    Attributes:
        kind: a name of ``build.KINDS``.
        size: hidden features, or rows of a table.
        shapes: of the parameters of a ``"raw"`` leaf.
        dtypes: of its layers (of a raw leaf's parameters), in turn.
        frozen: ``""``, ``"first"`` (parameter) or ``"all"``.
        used: in ``"always"``, ``"even"`` or ``"never"`` micro-batches.
        unit: how it is sharded, if it is a unit.
    """

    kind: str = "mlp"
    size: int = 3
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    frozen: str = ""
    used: str = "always"
    unit: Unit | None = None


@dataclass(frozen=True, repr=False)
class Tree(Short):
    """A sequence.

    ``listed``: its children that are no units of their own form one, as a list of modules, in
    place of the sequence itself. ``checkpoint``: ``""``, ``"reentrant"`` or ``"plain"``.
    """

    children: tuple[Leaf | Tree, ...] = ()
    unit: Unit | None = None
    listed: bool = False
    checkpoint: str = ""


@dataclass(frozen=True, repr=False)
class Mesh(Short):
    """Ranks of each axis; ``replicas=0`` is a 1-D data mesh, ``tensor=0`` no tensor parallelism."""

    shards: int = 2
    replicas: int = 0
    tensor: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the axes that exist."""
        return tuple(n for n in (self.replicas, self.shards, self.tensor) if n)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes that exist."""
        sizes = (("replicas", self.replicas), ("shards", self.shards), ("tensor", self.tensor))
        return tuple(name for name, n in sizes if n)

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return max(self.replicas, 1) * self.shards

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * max(self.tensor, 1)


@dataclass(frozen=True, repr=False)
class Quantized(Short):
    """``QuantizedComm``: formats as (name, elements of a block)."""

    weights: tuple[str, int] | None = None
    gradients: tuple[str, int] | None = None
    min_ndim: int = 2
    min_numel: int = 0
    stochastic: bool = False
    hierarchical: bool = True


@dataclass(frozen=True, repr=False)
class Offloaded(Short):
    """``Offload``."""

    params: str = "host"
    grads: str | None = None
    optimizer: str | None = None
    fraction: float = 1.0
    prefetch: int = 2
    chunk_bytes: int = 1 << 20
    checksums: bool = False


@dataclass(frozen=True, repr=False)
class Train(Short):
    """One micro-batch: forward and backward.

    ``forwards``: as many forwards before the first backward; ``joint``: one backward for all.
    ``keep``: do not reshard after backward.
    """

    sync: bool = True
    all_reduce: bool = True
    keep: bool = False
    forwards: int = 1
    joint: bool = False


@dataclass(frozen=True, repr=False)
class Evaluate(Short):
    """A forward whose outputs need no gradients."""

    inference: bool = False
    training: bool = False


@dataclass(frozen=True, repr=False)
class Clip(Short):
    """``clip_grad_norm_``."""

    max_norm: float = 0.1
    norm_type: float = 2.0


@dataclass(frozen=True, repr=False)
class Step(Short):
    """``optimizer.step()``."""


@dataclass(frozen=True, repr=False)
class Zero(Short):
    """``zero_grad``."""

    to_none: bool = True


@dataclass(frozen=True, repr=False)
class Save(Short):
    """Save, change all parameters, load; ``how``: a name of ``saving.WAYS``."""

    how: str = "memory"


@dataclass(frozen=True, repr=False)
class Write(Short):
    """Halve all parameters; ``how``: a name of ``saving.WRITES``."""

    how: str = "data"


@dataclass(frozen=True, repr=False)
class ByHand(Short):
    """``unshard()`` of a unit (by number), and ``reshard()`` after it or not."""

    unit: int = 0
    wait: bool = True
    reshard: bool = True


@dataclass(frozen=True, repr=False)
class Fail(Short):
    """An exception in every rank's forward or backward, ``reset_iter_state()``, zero gradients."""

    backward: bool = False


Action = Train | Evaluate | Clip | Step | Zero | Save | Write | ByHand | Fail


@dataclass(frozen=True, repr=False)
class Case(Short):
    """One model, one way to shard it, one script.

    ``optimizer``: a name of ``build.OPTIMIZERS``. ``meta``: sharded before it has memory.
    ``prefetch``: seed of random explicit prefetches, 0 for none.
    """

    tree: Tree = Tree()
    width: int = 3
    mesh: Mesh = Mesh()
    quantized: Quantized | None = None
    offload: Offloaded | None = None
    optimizer: str = "sgd"
    input_grad: bool = False
    meta: bool = False
    prefetch: int = 0
    script: tuple[Action, ...] = ()
    seed: int = 0


def leaves(tree: Leaf | Tree) -> Iterator[Leaf]:
    """All leaves, in order."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for child in tree.children:
            yield from leaves(child)


def trees(tree: Leaf | Tree) -> Iterator[Tree]:
    """All sequences, outer ones first."""
    if isinstance(tree, Tree):
        yield tree
        for child in tree.children:
            yield from trees(child)


def units(tree: Leaf | Tree) -> Iterator[Unit]:
    """Settings of all units."""
    if tree.unit is not None:
        yield tree.unit
    if isinstance(tree, Tree):
        for child in tree.children:
            yield from units(child)


NAMES = {
    kind.__name__: kind
    for kind in (
        Policy,
        Unit,
        Leaf,
        Tree,
        Mesh,
        Quantized,
        Offloaded,
        Train,
        Evaluate,
        Clip,
        Step,
        Zero,
        Save,
        Write,
        ByHand,
        Fail,
        Case,
    )
}


def parse(text: str) -> Case:
    """The case whose ``repr`` is ``text``."""
    case = eval(text, {"__builtins__": {}, "inf": float("inf"), **NAMES})
    assert isinstance(case, Case)
    return case
