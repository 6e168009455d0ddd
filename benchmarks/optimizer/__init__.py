"""Measurements of optimizer steps alone."""
