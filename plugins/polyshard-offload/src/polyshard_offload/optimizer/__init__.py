"""Steps of optimizers whose state rests elsewhere."""
