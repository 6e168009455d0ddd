"""A model changes its number of ranks in the living processes."""
