"""Quantized communication for polyshard: 8-bit (or 4-bit) all-gathers and reductions."""

from __future__ import annotations

from polyshard_quantized.__about__ import __version__
from polyshard_quantized.exclusions import Exclusions
from polyshard_quantized.feedback import ErrorFeedback
from polyshard_quantized.formats import BlockFormat, Float8Block, Int4Block, Int8Block
from polyshard_quantized.plugin import QuantizedComm
from polyshard_quantized.report import GroupReport, ParameterReport, Report, TransferReport
from polyshard_quantized.roundtrip import round_trip

__all__ = [
    "BlockFormat",
    "ErrorFeedback",
    "Exclusions",
    "Float8Block",
    "GroupReport",
    "Int4Block",
    "Int8Block",
    "ParameterReport",
    "QuantizedComm",
    "Report",
    "TransferReport",
    "__version__",
    "round_trip",
]
