"""One thin adapter for each peer, with the versions it was tried with; each needs that peer."""
