"""One training job under several engines, side by side: time, memory, bytes, losses."""

from polyshard_compare.__about__ import __version__
from polyshard_compare.comparing import compare
from polyshard_compare.errors import CompareError, JobError
from polyshard_compare.job.job import Job
from polyshard_compare.report.document import Comparison, Result
from polyshard_compare.settings import Settings

__all__ = [
    "CompareError",
    "Comparison",
    "Job",
    "JobError",
    "Result",
    "Settings",
    "__version__",
    "compare",
]
