"""Plugins: what they declare, how they are found, checked, ordered and asked."""
