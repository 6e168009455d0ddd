"""A step whose ranks are not there: the engine's own plan of it, and what it computes."""
