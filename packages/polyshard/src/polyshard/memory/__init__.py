"""Memory that comes and goes under tensors that stay."""
