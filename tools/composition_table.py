"""Which combinations of plugins, meshes, dtypes and ways to train are tested, and how closely.

One table, read by ``integration_tests`` (which runs every cell of it on real ranks) and by
``tools/make_combination_docs.py`` (which prints it). Nothing of torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import combinations

import subsets

Stack = tuple[str, ...]
PLUGINS: Stack = tuple(map(subsets.short, subsets.COMPOSED))
"""The plugins that are combined; their distributions are called ``polyshard-NAME``."""

STACKS: tuple[Stack, ...] = tuple(
    subset for count in range(len(PLUGINS) + 1) for subset in combinations(PLUGINS, count)
)
DTYPES = ("fp32", "bf16")
"""What is computed in; parameters, sums of gradients and optimizer state are fp32 in both."""


@dataclass(frozen=True)
class Layout:
    """Ranks of each axis of the mesh."""

    name: str
    replicas: int
    shards: int
    tensor: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.replicas * self.shards * self.tensor

    @property
    def parts(self) -> int:
        """Batches of a step: tensor-parallel ranks share theirs."""
        return self.replicas * self.shards

    @property
    def sizes(self) -> str:
        """As the page shows it."""
        sizes = [self.shards]
        if self.replicas > 1:
            sizes.insert(0, self.replicas)
        if self.tensor > 1:
            sizes.append(self.tensor)
        return " × ".join(map(str, sizes))


FSDP = Layout("FSDP", 1, 2, 1)
HSDP = Layout("HSDP", 2, 2, 1)
FSDP_TP = Layout("FSDP × TP", 1, 2, 2)
HSDP_TP = Layout("HSDP × TP", 2, 1, 2)


def layouts_of(stack: Stack) -> tuple[Layout, ...]:
    """The meshes of a stack; one with tensor parallelism also runs where it has one rank."""
    return (FSDP, HSDP_TP, FSDP_TP) if "tensor-parallel" in stack else (FSDP, HSDP)


FEATURES = {
    "plain": "two AdamW steps; `describe()` predicts the bytes of a third",
    "accumulation": "two micro-batches a step, the first without synchronisation",
    "checkpointing": "every block recomputed in backward",
    "compiled": "every block compiled (on four ranks the first)",
    "clipping": "gradients clipped by their total norm",
    "evaluation": "a no-grad forward in eval mode between the steps",
    "reload": "saved by `Checkpoints`, loaded at another rank count without plugins, saved there, "
    "and loaded with the plugins",
}


THOROUGH = ("accumulation", "checkpointing", "compiled", "evaluation")


class Agreement(Enum):
    """How close a cell is to the same training in one process."""

    BITS = "="
    ROUNDING = "≈"
    FORMAT = "~"


ROUNDING_TOLERANCE = 1e-6
"""Of fp32 sums in another order, relative to a tensor's 2-norm."""
FORMAT_TOLERANCES = {"int8": 2 / 127, "bf16": 4 * 2.0**-7}
"""Steps between neighbouring values of a format, relative to a tensor's 2-norm.

One step wherever a value is rounded one after the other: int8 in the parameters and in the
gradients, bf16 in the activations of two blocks, and in their gradients.
"""


@dataclass(frozen=True)
class Cell:
    """One test."""

    stack: Stack
    layout: Layout
    dtype: str
    feature: str

    @property
    def id(self) -> str:
        """Names the cell in a test's id."""
        mesh = self.layout.name.replace(" × ", "x").lower()
        return "-".join((subsets.stack_of(self.stack), mesh, self.dtype, self.feature))

    @property
    def is_thorough(self) -> bool:
        """Whether CI leaves it out: dtypes change little about it, some of the plugins too."""
        if self.feature == "compiled" and self.stack:
            return True  # a graph breaks at the same places with and without plugins
        return self.dtype == "bf16" and self.feature in THOROUGH

    @property
    def agreement(self) -> Agreement:
        """The same operations in the same order give the same bits, lossy or not.

        Tensor parallelism adds up what one process has in one product, and a norm is a sum over
        ranks: there the last bit may differ, and what is rounded to 8 bits afterwards may become
        the next value of its format.
        """
        if self.layout.tensor == 1 and self.feature != "clipping":
            return Agreement.BITS
        return Agreement.FORMAT if self._formats else Agreement.ROUNDING

    @property
    def tolerance(self) -> float:
        """Relative to the 2-norm; what the formats of the stack leave open adds up."""
        if self.agreement is Agreement.FORMAT:
            return sum(FORMAT_TOLERANCES[name] for name in self._formats)
        return ROUNDING_TOLERANCE

    @property
    def _formats(self) -> tuple[str, ...]:
        int8 = ("int8",) if "quantized" in self.stack else ()
        return (*int8, "bf16") if self.dtype == "bf16" else int8


CELLS = tuple(
    Cell(stack, layout, dtype, feature)
    for stack in STACKS
    for layout in layouts_of(stack)
    for dtype in DTYPES
    for feature in FEATURES
)


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot work, and what its user reads.

    Attributes:
        id: names the test and the function that provokes it.
        stack: plugins it needs.
        what: as the page says it.
        error: name of the class.
        words: part of the message.
        absent: plugins that must not be installed for it.
    """

    id: str
    stack: Stack
    what: str
    error: str
    words: str
    absent: Stack = ()


OFFLOAD, QUANTIZED, TENSOR_PARALLEL = ((name,) for name in PLUGINS)
REFUSALS = (
    Refusal("divided-parameters-alone", (),
            "parameters divided by tensor parallelism, without the plugin",
            "UnsupportedError", "polyshard-tensor-parallel", absent=TENSOR_PARALLEL),
    Refusal("offload-policy-alone", (), "`CPUOffloadPolicy`, without the plugin",
            "UnsupportedError", "pip install polyshard-offload", absent=OFFLOAD),
    Refusal("offload-twice", OFFLOAD, "two plugins that keep the shards of one group",
            "ConflictError", "both claim the shard storage"),
    Refusal("offload-policy-beside-offload", OFFLOAD, "`CPUOffloadPolicy` beside `Offload`",
            "PluginError", "are named 'offload'"),
    Refusal("gradients-apart", OFFLOAD, "gradients on the host, parameters on the device",
            "SettingError", "only together with the parameters"),
    Refusal("clipping-after-steps", OFFLOAD, "clipping, where backward steps the optimizer",
            "OffloadError", "step_in_backward=False"),
    Refusal("steps-without-gradients", OFFLOAD, "stepping in backward with gradients on disk",
            "SettingError", "choose grads='host'"),
    Refusal("closures", OFFLOAD, "an optimizer that calls the model again (`LBFGS`)",
            "OffloadError", "needs a closure"),
    Refusal("subclass-offloaded", OFFLOAD,
            "tensor subclasses with an all-gather of their own, offloaded",
            "ConflictError", "bring FSDP2's"),
    Refusal("two-codecs", QUANTIZED, "two plugins with a codec for one group",
            "ConflictError", "both claim the gather codec"),
    Refusal("nothing-quantized", QUANTIZED, "neither parameters nor gradients quantized",
            "SettingError", "leave the plugin out"),
    Refusal("subclass-quantized", QUANTIZED,
            "tensor subclasses with an all-gather of their own, quantized",
            "ConflictError", "bring FSDP2's"),
    Refusal("one-rank-quantized", QUANTIZED, "ranks with different stacks",
            "PlanMismatchError", "quantized"),
    Refusal("one-mesh-for-both", TENSOR_PARALLEL,
            "a data-parallel mesh that covers tensor-parallel ranks",
            "MeshError", "shares ranks"),
    Refusal("block-first", TENSOR_PARALLEL,
            "a block sharded before the plan was applied to the model",
            "LifecycleError", "call apply(model)"),
    Refusal("rows-left-over", TENSOR_PARALLEL, "rows that the tensor-parallel ranks do not divide",
            "SettingError", "with a remainder"),
    Refusal("matrices-offloaded", OFFLOAD,
            "gradients that land whole on owners, and move to the host or to disk",
            "UnsupportedError", "moves gradients to where shards rest"),
    Refusal("matrices-with-quantized-gradients", QUANTIZED,
            "gradients that land whole on owners, quantized",
            "UnsupportedError", "encodes the gradients of all ranks in rows"),
    Refusal("matrices-in-reproducible-runs", ("reproducible",),
            "gradients that land whole on owners, summed in the tree of slots",
            "ConflictError", "gradient-landing"),
)  # fmt: skip
