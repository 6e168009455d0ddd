"""One thin adapter for each version of a peer; each needs that peer installed."""
