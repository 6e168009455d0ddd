"""The version of this distribution; all distributions of the repository carry one."""

__version__ = "0.1.0"
