"""Ranks compare their plans before anything is communicated."""
