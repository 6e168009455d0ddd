"""A training step beside FSDP2: what is trained, by which engines, how long and how much memory."""
