"""What a long run checks of itself: finite gradients, memory that holds what was written."""
