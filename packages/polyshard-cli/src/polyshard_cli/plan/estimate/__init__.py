"""What follows from a dry run: memory, bytes, and time on a machine of known speed."""
