"""The same bits at every world size: gradients summed over one fixed tree of micro-batches."""

from polyshard_reproducible.__about__ import __version__
from polyshard_reproducible.checks import check_optimizer
from polyshard_reproducible.comparing import Comparison, Difference, compare
from polyshard_reproducible.errors import RecordsError, ReproducibleError
from polyshard_reproducible.norms import clip_grad_norm_, grad_norm
from polyshard_reproducible.plugin import Reproducible
from polyshard_reproducible.recorder import Recorder
from polyshard_reproducible.sampling import SlotSampler
from polyshard_reproducible.shares import ReplicaGroups

__all__ = [
    "Comparison",
    "Difference",
    "Recorder",
    "RecordsError",
    "ReplicaGroups",
    "Reproducible",
    "ReproducibleError",
    "SlotSampler",
    "__version__",
    "check_optimizer",
    "clip_grad_norm_",
    "compare",
    "grad_norm",
]
