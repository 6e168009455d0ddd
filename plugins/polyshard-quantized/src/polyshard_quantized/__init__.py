"""Quantized communication for polyshard: 8-bit (or 4-bit) all-gathers and reductions."""

from __future__ import annotations

from polyshard_quantized.__about__ import __version__
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.formats.float8 import Float8Block
from polyshard_quantized.formats.int4 import Int4Block
from polyshard_quantized.formats.int8 import Int8Block
from polyshard_quantized.formats.registry import format_named, format_names
from polyshard_quantized.layout.exclusions import Exclusions
from polyshard_quantized.plugin import QuantizedComm
from polyshard_quantized.report import GroupReport, ParameterReport, Report, TransferReport
from polyshard_quantized.roundtrip import round_trip
from polyshard_quantized.transfers.feedback import ErrorFeedback

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
    "format_named",
    "format_names",
    "round_trip",
]
