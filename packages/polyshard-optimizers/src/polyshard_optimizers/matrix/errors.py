"""Errors of the plugin that a user can meet."""

from __future__ import annotations

from polyshard.errors import PluginError


class MatrixError(PluginError):
    """A parameter, a gradient or a setting does not fit a whole-matrix optimizer."""
