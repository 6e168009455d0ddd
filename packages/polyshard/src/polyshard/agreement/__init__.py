"""Ranks compare their plans, and quote each other's failures."""
