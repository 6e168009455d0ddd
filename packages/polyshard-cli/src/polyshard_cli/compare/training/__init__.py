"""One rank of one engine: its steps, and what they cost."""
