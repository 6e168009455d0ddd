"""Parts of plugins that answer something else than their seam asks for: refused when bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_adapters import Negating
from toy_codecs import BytesGather, BytesReduce, Doubling, TwoHops
from toy_storage import Away, SlowBackend
from toy_transforms import Flattening
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, Plugin, describe, fully_shard, hookimpl
from polyshard.errors import PlanMismatchError, PluginError
from polyshard.plugins.seams import (
    CollectivesBackend,
    GatherCodec,
    GroupInfo,
    ReduceCodec,
    ShardingConstraint,
    StateDictAdapter,
    StorageFactory,
)
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import raises_in_step, ranks


def plugin_of(hook: str, part: object) -> Plugin:
    """A plugin called ``odd`` that contributes ``part``."""

    def implementation(self: Any, group: GroupInfo) -> object:
        return part

    made: Any = type("Odd", (Plugin,), {"name": "odd", hook: hookimpl(implementation)})()
    plugin: Plugin = made
    return plugin


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def use(plugins: Sequence[object]) -> None:
    """Everything that a part may be asked for."""
    model: Any = fully_shard(linear(), plugins=plugins)
    model.load_state_dict(model.state_dict())
    model(torch.ones(1, 4)).sum().backward()


# Storages -----------------------------------------------------------------------------------------


class Storing(StorageFactory):
    """Makes storages of one class."""

    name, settings = "storing", ""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Any:
        return self.kind()


class RestsNothing(Away):
    @override
    def rest(self, shard: Tensor) -> Any:
        super().rest(shard)


class RestsWide(Away):
    @override
    def rest(self, shard: Tensor) -> Tensor:
        return super().rest(shard.double())


class RestsLong(Away):
    @override
    def rest(self, shard: Tensor) -> Tensor:
        return super().rest(torch.cat([shard, shard]))


class RestsEmpty(Away):
    """Makes room and forgets to copy."""

    @override
    def rest(self, shard: Tensor) -> Tensor:
        return super().rest(torch.zeros_like(shard))


class ViewsAnew(Away):
    @override
    def view(self) -> Tensor:
        return super().view().clone()


class ViewsWide(Away):
    @override
    def view(self) -> Tensor:
        return super().view().double()


class ViewsShort(Away):
    @override
    def view(self) -> Tensor:
        return super().view()[1:]


class PlacesNothing(Away):
    @override
    def place_gradient(self, gradient: Tensor) -> Any:
        del gradient


class PlacesWide(Away):
    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.double()


class PlacesPart(Away):
    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient[:2]


STORAGES: list[tuple[type, str]] = [
    (RestsNothing, "returned None"),
    (RestsWide, r"returned torch\.float64 elements, not torch\.float32"),
    (RestsLong, r"returned a tensor of shape \(\d+,\), not \(\d+,\)"),
    (RestsEmpty, "returned a tensor of other values; copy the shard into it"),
    (ViewsAnew, "returned another tensor when called again"),
    (ViewsWide, r"returned torch\.float64 elements"),
    (ViewsShort, r"returned a tensor of shape"),
    (PlacesNothing, "returned None; return the gradient"),
    (PlacesWide, r"returned torch\.float64 elements"),
    (PlacesPart, r"returned a tensor of shape \(2,\)"),
]


@pytest.mark.parametrize("index", range(len(STORAGES)), ids=lambda i: STORAGES[i][0].__name__)
@ranks(2)
def test_answers_of_storages(rank: int, size: int, index: int) -> None:
    kind, problem = STORAGES[index]
    method = {"R": "rest", "V": "view", "P": "place_gradient"}[kind.__name__[0]]
    group = "Linear" if method == "rest" else r"\(root\)"
    pattern = rf"plugin 'odd' \(0\): {kind.__name__}\.{method} for group '{group}' {problem}"
    with raises_in_step(PluginError, pattern):
        use([plugin_of("polyshard_shard_storage", Storing(kind))])


# Codecs, constraints, transports, adapters -------------------------------------------------------


class Halves(BytesGather):
    """Counts bytes in floats."""

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.payload_bytes = self.payload_bytes / 1  # type: ignore[assignment]


class Returns(BytesGather):
    """Returns the payload instead of writing it."""

    @override
    def encode(self, shard: Tensor, payload: Tensor) -> Any:
        return payload.clone()


class DecodesAnew(BytesGather):
    @override
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> Any:
        return [region.clone() for region in regions]


class Missing(BytesReduce):
    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.payload_bytes = None  # type: ignore[assignment]


class SumsAnew(BytesReduce):
    @override
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> Any:
        return [out.clone() for out in outs]


class Lonely(BytesReduce):
    """Its second hop has nothing to it."""

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout)
        self.replicas = object()  # type: ignore[assignment]


class Binds(GatherCodec, ReduceCodec):
    """Binds codecs of one class."""

    name, settings = "binds", ""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Any:
        return self.kind(layout)


@dataclass(frozen=True)
class Whatever(ShardingConstraint):
    """A constraint that answers as told."""

    answer: Any
    name: str = "whatever"
    settings: str = ""

    def block_elements(self, param: Any) -> Any:
        return self.answer


class Elsewhere(SlowBackend):
    @override
    def bind(self, group: Any, roles: Any) -> Any:
        transport = super().bind(group, roles)
        transport.rank = 1 - transport.rank
        return transport


class Routeless(SlowBackend):
    @override
    def bind(self, group: Any, roles: Any) -> Any:
        transport: Any = super().bind(group, roles)
        transport.gather_route = lambda pieces, tag: None.__class__
        return transport


class Forgetful(Negating):
    @override
    def on_save(self, param: Any, value: Any) -> Any:
        return None


class Blank(Negating):
    @override
    def on_load(self, param: Any, value: Any) -> Any:
        return None


PARTS: list[tuple[str, object, str]] = [
    (
        "gather_codec",
        Binds(Halves),
        r"plugin 'odd' \(0\): Halves\.payload_bytes for group '\(root\)' is \d+\.0; give a whole",
    ),
    ("gather_codec", Binds(Returns), r"Returns\.encode returned a Tensor, which would be dropped"),
    ("gather_codec", Binds(DecodesAnew), r"DecodesAnew\.decode returned a list"),
    ("reduce_codec", Binds(Missing), r"'odd' \(0\): Missing\.payload_bytes .* is None"),
    ("reduce_codec", Binds(SumsAnew), r"SumsAnew\.decode_sum returned a list"),
    (
        "reduce_codec",
        Binds(Lonely),
        r"Binds\.bind\(\.\.\.\)\.replicas .*returned .*BoundReplicaCodec",
    ),
    (
        "sharding_constraint",
        Whatever(0),
        r"'odd' \(0\): Whatever\.block_elements for group 'Linear' returned 0 for 'weight'",
    ),
    ("sharding_constraint", Whatever(None), r"block_elements .* returned None for 'weight'"),
    ("sharding_constraint", Whatever(2.0), r"block_elements .* returned 2\.0 for 'weight'"),
    ("collectives_backend", Elsewhere(), r"Elsewhere\.bind .* a transport of rank [01] of 2"),
    ("collectives_backend", Routeless(), r"gather_route returned the class NoneType"),
    ("state_dict_adapter", Forgetful(), r"'negating': on_save returned a NoneType for 'weight'"),
    ("state_dict_adapter", Blank(), r"'negating': on_load returned a NoneType for 'weight'"),
]


@pytest.mark.parametrize("index", range(len(PARTS)))
@ranks(2)
def test_answers_of_other_parts(rank: int, size: int, index: int) -> None:
    hook, part, pattern = PARTS[index]
    with raises_in_step(PluginError, pattern):
        use([plugin_of(f"polyshard_{hook}", part)])


# What ranks compare -------------------------------------------------------------------------------


class Padded(BytesGather):
    """Sends some bytes more."""

    def __init__(self, layout: GroupLayout, extra: int) -> None:
        super().__init__(layout)
        self.extra = extra
        self.payload_bytes += extra

    @override
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        super().encode(shard, payload[: len(payload) - self.extra])

    @override
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        super().decode(payloads[:, : payloads.shape[1] - self.extra], regions)


class PaddedReduce(BytesReduce):
    def __init__(self, layout: GroupLayout, extra: int) -> None:
        super().__init__(layout)
        self.payload_bytes += extra


class PaddedReplicas(TwoHops):
    def __init__(self, layout: GroupLayout, extra: int) -> None:
        super().__init__(layout)
        self.replicas = Doubling(layout)
        self.replicas.payload_bytes += extra


@dataclass(frozen=True)
class Extra(GatherCodec, ReduceCodec):
    """A codec factory whose settings do not show what it does."""

    kind: Any
    extra: int
    name: str = "extra"
    settings: str = ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Any:
        return self.kind(layout, self.extra)


@dataclass(frozen=True)
class Set(ShardingConstraint, StateDictAdapter, CollectivesBackend):
    """A constraint, an adapter and a backend with settings."""

    settings: str
    name: str = "set"
    block: int = 1

    def block_elements(self, param: Any) -> int:
        return self.block

    def on_save(self, param: Any, value: Any) -> Any:
        return value

    def on_load(self, param: Any, value: Any) -> Any:
        return value

    def bind(self, group: Any, roles: Any) -> Any:
        return SlowBackend().bind(group, roles)


DIFFERENCES: list[tuple[str, Any, Any, str]] = [
    (
        "gather_codec",
        Extra(Padded, 0),
        Extra(Padded, 4),
        r"-.*payload bytes gather 40, reduce native, replicas native\n\+.*gather 44",
    ),
    ("reduce_codec", Extra(PaddedReduce, 0), Extra(PaddedReduce, 8), r"-.*reduce 40.*\n\+.*e 48"),
    (
        "reduce_codec",
        Extra(PaddedReplicas, 0),
        Extra(PaddedReplicas, 8),
        r"-.*replicas \d+\n\+.*replicas \d+",
    ),
    ("sharding_constraint", Set("x"), Set("y"), r"-.*constraint set\(x\): weight 1, bias 1\n\+.*y"),
    ("sharding_constraint", Set("x"), Set("x", block=2), r"-.*weight 1, bias 1\n\+.*weight 2"),
    ("state_dict_adapter", Set("x"), Set("y"), r"-.*state-dict adapter set\(x\)\n\+.*set\(y\)"),
    ("collectives_backend", Set("x"), Set("y"), r"-.*collectives set\(x\).*\n\+.*set\(y\)"),
]


@pytest.mark.parametrize("index", range(len(DIFFERENCES)))
@ranks(2)
def test_what_changes_results_or_sizes_is_compared(rank: int, size: int, index: int) -> None:
    hook, ours, theirs, pattern = DIFFERENCES[index]
    part = theirs if rank else ours
    model: Any = fully_shard(linear(), plugins=[plugin_of(f"polyshard_{hook}", part)])
    with pytest.raises(PlanMismatchError, match=pattern):
        model(torch.ones(1, 4))


class Sometimes(Flattening):
    """Transposes square matrices where it is told to: the shape does not show it."""

    name = "sometimes"

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> Any:
        return (tensor.t(), "t") if self.takes and tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor.t()


@ranks(2)
def test_a_transform_on_one_rank_is_refused(rank: int, size: int) -> None:
    model: Any = fully_shard(linear(), plugins=[Sometimes(takes=rank == 1)])
    pattern = r"-.* parameter weight \(4, 4\) .*\n(?s:.*)\+.* flattened by sometimes"
    with pytest.raises(PlanMismatchError, match=pattern):
        model(torch.ones(1, 4))
    text = describe(
        fully_shard(linear(), plugins=[plugin_of("polyshard_state_dict_adapter", Set("x"))])
    )
    assert "state-dict adapter set(x)" in str(text)


# Transforms ---------------------------------------------------------------------------------------


def transform(flatten: Any, unflatten: Any) -> Plugin:
    class Odd(Plugin):
        name = "odd"

        @hookimpl
        def pre_flatten_transform(self, tensor: Tensor) -> Any:
            return (flatten(tensor), 1) if tensor.ndim == 2 else None

        @hookimpl
        def post_unflatten_transform(self, tensor: Tensor) -> Any:
            return unflatten(tensor)

    return Odd()


COPY = r"plugin 'odd' \(0\): post_unflatten_transform returned a copy of 'weight'"
TRANSFORMS: dict[str, tuple[Any, Any, str]] = {
    "copy": (torch.t, lambda t: t.t().contiguous(), COPY),
    "clone": (lambda t: t, torch.clone, COPY),
    "not undone": (torch.t, lambda t: t, r"'odd': the inverse .* 'weight' .* must invert"),
    "wrong shape": (
        lambda t: t.reshape(-1),
        lambda t: t,
        r"'odd': .*'weight' \(4, 4\) gives a Tensor of shape \(16,\)",
    ),
    "no tensor": (torch.t, lambda t: "w", "post_unflatten_transform returned a str for 'weight'"),
}


@pytest.mark.parametrize("case", TRANSFORMS)
@ranks(2)
def test_transforms_that_cannot_be_undone(rank: int, size: int, case: str) -> None:
    flatten, unflatten, pattern = TRANSFORMS[case]
    model = linear()
    before = model.weight
    with pytest.raises(PluginError, match=pattern):
        fully_shard(model, plugins=[transform(flatten, unflatten)])
    assert model.weight is before, "nothing was sharded"


@ranks(2)
def test_a_copy_of_the_compute_dtype_is_refused(rank: int, size: int) -> None:
    """A cast that copies only where parameters are computed with in another dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plugin = transform(lambda t: t.reshape(-1), lambda t: t.float().view(4, 4))
    exact: Any = fully_shard(linear(), plugins=[plugin])
    exact(torch.ones(1, 4)).sum().backward()
    model: Any = fully_shard(linear(), plugins=[plugin], mp_policy=policy)
    with raises_in_step(PluginError, COPY):
        model(torch.ones(1, 4))


@ranks(2)
def test_gradients_are_flattened_as_parameters_were(rank: int, size: int) -> None:
    def flatten(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1) if bool((tensor >= 1.0).all()) else tensor.t()  # by its values

    model = linear()
    plugin = transform(flatten, lambda t: t.t())
    sharded: Any = fully_shard(model, plugins=[plugin])
    pattern = (
        r"'odd': pre_flatten_transform returned \(16,\) for the gradient of 'weight', but \(4, 4\)"
    )
    with raises_in_step(PluginError, pattern):
        sharded(torch.ones(1, 4)).sum().backward()


@ranks(2)
def test_transforms_are_checked_whatever_the_values(rank: int, size: int) -> None:
    """What is right stays right: views of every kind, nan values, meta tensors."""
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model = linear()
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    fully_shard(model, mesh=mesh, plugins=[transform(torch.t, torch.t)])
    with torch.device("meta"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, plugins=[transform(torch.t, torch.t)])
        bad = transform(torch.t, lambda t: t.t().clone())
        with pytest.raises(PluginError, match=COPY):
            fully_shard(nn.Linear(4, 4), mesh=mesh, plugins=[bad])
