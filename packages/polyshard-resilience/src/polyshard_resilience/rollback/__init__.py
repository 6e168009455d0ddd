"""Steps that succeed on all ranks, or are undone on all of them."""
