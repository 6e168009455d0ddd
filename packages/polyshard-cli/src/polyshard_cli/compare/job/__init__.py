"""What is trained: a model, its batches, its loss."""
