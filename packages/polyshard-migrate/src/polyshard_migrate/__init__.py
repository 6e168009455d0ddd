"""Rewrites scripts that use FSDP2, FSDP1, DDP or DeepSpeed for polyshard; lists what is left."""

from polyshard_migrate.__about__ import __version__
from polyshard_migrate.editing.finding import Finding, Kind
from polyshard_migrate.errors import MigrateError
from polyshard_migrate.migration import migrate_files, write_files
from polyshard_migrate.report.document import Document, MigratedFile

__all__ = [
    "Document",
    "Finding",
    "Kind",
    "MigrateError",
    "MigratedFile",
    "__version__",
    "migrate_files",
    "write_files",
]
