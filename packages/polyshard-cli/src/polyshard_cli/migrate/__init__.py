"""Rewrites scripts that use FSDP2, FSDP1, DDP or DeepSpeed for polyshard; lists what is left."""

from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.errors import MigrateError
from polyshard_cli.migrate.migration import migrate_files, write_files
from polyshard_cli.migrate.report.document import Document, MigratedFile

__all__ = [
    "Document",
    "Finding",
    "Kind",
    "MigrateError",
    "MigratedFile",
    "migrate_files",
    "write_files",
]
