"""The two decorators of the plugin contract; importable without torch."""

from __future__ import annotations

import pluggy

PROJECT = "polyshard"
HOOK_API = (1, 0)
"""Version of the hook specifications (major, minor). A new hook or argument is a minor change; a
changed meaning is a major one, and plugins written for another major are refused."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
