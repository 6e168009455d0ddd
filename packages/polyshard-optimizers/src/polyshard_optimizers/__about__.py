"""The version, and nothing that needs importing torch."""

__version__ = "0.1.0"
