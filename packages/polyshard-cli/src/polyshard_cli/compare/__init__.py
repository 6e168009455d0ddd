"""One training job under several engines, side by side: time, memory, bytes, losses."""

from polyshard_cli.compare.comparing import compare
from polyshard_cli.compare.errors import CompareError, JobError
from polyshard_cli.compare.job.job import Job
from polyshard_cli.compare.report.document import Comparison, Result
from polyshard_cli.compare.settings import Settings

__all__ = [
    "CompareError",
    "Comparison",
    "Job",
    "JobError",
    "Result",
    "Settings",
    "compare",
]
