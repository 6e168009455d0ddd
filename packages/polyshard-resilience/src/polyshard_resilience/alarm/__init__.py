"""Whoever fails, all ranks know within a second, and those who wait are woken."""
