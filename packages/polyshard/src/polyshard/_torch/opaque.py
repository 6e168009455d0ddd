"""What an operator needs that runs autograd of its own, inside graphs that ``torch.compile`` made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module


@dataclass(frozen=True)
class Compiler:
    """How the graph is compiled that is being traced."""

    backend: Callable[..., Any]
    fullgraph: bool

    @classmethod
    def of_trace(cls) -> Compiler:
        """For code that runs while dynamo traces."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        trace = InstructionTranslator.current_tx()
        backend = trace.output.compiler_fn
        assert backend is not None
        return cls(backend, bool(trace.one_graph or trace.error_on_graph_break))

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, compiled alike."""
        compiled: Callable[..., Any]
        compiled = torch.compile(function, backend=self.backend, fullgraph=self.fullgraph)
        return compiled


@contextmanager
def own_autograd(enabled: bool) -> Iterator[None]:
    """Record a graph although autograd is done with the operator that this runs in."""
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    for name in _AUTOGRAD_KEYS:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(enabled):
        yield


_AUTOGRAD_KEYS = tuple(
    name
    for name in dir(torch._C.DispatchKey)
    if (name.startswith("Autograd") and "Functionality" not in name) or name == "ADInplaceOrView"
)


@contextmanager
def stand_ins(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have ``module`` hold ``values`` under their names."""
    with _reparametrize_module(module, dict(values)):
        yield
