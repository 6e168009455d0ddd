"""What this plugin refuses."""

from polyshard.errors import SettingError


class ReproducibleError(SettingError):
    """Something that would make results depend on the number of ranks; the message says why."""


class RecordsError(SettingError):
    """Records that cannot be compared; the message says which, and why."""
