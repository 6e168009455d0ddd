"""What ranks did and when: traces for Perfetto in one clock, and tables of them."""

from polyshard_trace.__about__ import __version__
from polyshard_trace.errors import TraceError
from polyshard_trace.reading.merging import Alignment, Merged, merge
from polyshard_trace.reading.summary import Row, Summary, summarize
from polyshard_trace.recording.trace import Trace

__all__ = [
    "Alignment",
    "Merged",
    "Row",
    "Summary",
    "Trace",
    "TraceError",
    "__version__",
    "merge",
    "summarize",
]
