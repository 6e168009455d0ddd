"""Whole-matrix optimizers: time and bytes of a Muon step, each way to make it."""
