"""Which settings are best: all that could be chosen, planned, and compared."""
