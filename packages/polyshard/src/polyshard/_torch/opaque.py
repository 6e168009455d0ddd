"""What an operator needs that runs modules and autograd inside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.nn.utils.stateless import _reparametrize_module

from polyshard._torch.private import skip_frames_of

_AUTOGRAD_KEYS = (
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
    DispatchKey.AutogradFunctionality,
)


@dataclass(frozen=True)
class Compiler:
    """How the graph is compiled that is being traced, and under which autocast."""

    backend: Callable[..., Any]
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of_trace(cls, device_types: tuple[str, ...]) -> Compiler:
        """For code that runs while dynamo traces."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        trace = InstructionTranslator.current_tx()
        backend = trace.output.compiler_fn
        assert backend is not None
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in device_types
            if torch.is_autocast_enabled(kind)
        )
        return cls(backend, autocast)

    @staticmethod
    def allows_breaks() -> bool:
        """Whether the graph that is being traced may end at what dynamo cannot trace."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        trace = InstructionTranslator.current_tx()
        return not (trace.one_graph or trace.error_on_graph_break)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What ``function`` calls, compiled alike, frame by frame."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        # torch 2.15 would trace the hooks of a module of its own, such as an embedding, whose
        # forward it does not compile by itself.
        skip_frames_of(call)
        compiled: Callable[..., Any]
        compiled = torch.compile(call, backend=self.backend, fullgraph=True)
        return compiled

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast as it was where the graph was traced; graphs run without."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            yield


@contextmanager
def own_autograd(enabled: bool) -> Iterator[None]:
    """Record a graph although autograd is done with the operator that this runs in."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(enabled):
        yield


@contextmanager
def stand_ins(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have ``module`` hold ``values`` under their names."""
    with _reparametrize_module(module, dict(values)):
        yield


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have dynamo run ``function`` while it traces, and take what it returns for a constant.

    What ``torch.compiler.assume_constant_result`` does, without importing dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
