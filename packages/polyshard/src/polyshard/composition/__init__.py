"""Several plugins on one group: their order, their claims, what wraps what."""
