"""What ranks did and when: traces for Perfetto in one clock, and tables of them."""

from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.reading.merging import Alignment, Merged, merge
from polyshard_cli.trace.reading.summary import Row, Summary, summarize
from polyshard_cli.trace.recording.trace import Trace

__all__ = [
    "Alignment",
    "Merged",
    "Row",
    "Summary",
    "Trace",
    "TraceError",
    "merge",
    "summarize",
]
