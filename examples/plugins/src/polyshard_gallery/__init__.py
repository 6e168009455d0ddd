"""Six small plugins for polyshard, one module each."""
