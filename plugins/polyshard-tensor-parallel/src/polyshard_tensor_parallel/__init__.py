"""Tensor parallelism for polyshard: FSDP x TP, and HSDP x TP, as a plugin."""

from __future__ import annotations

from polyshard_tensor_parallel.__about__ import __version__
from polyshard_tensor_parallel.experts import ExpertParallel
from polyshard_tensor_parallel.plans.plan import Heads, Plan
from polyshard_tensor_parallel.plans.ready_made import demo_plan, llama_plan
from polyshard_tensor_parallel.plugin import TensorParallel
from polyshard_tensor_parallel.report import ParameterReport, Report

__all__ = [
    "ExpertParallel",
    "Heads",
    "ParameterReport",
    "Plan",
    "Report",
    "TensorParallel",
    "__version__",
    "demo_plan",
    "llama_plan",
]
