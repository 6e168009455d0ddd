"""What polyshard-quantized costs in time and in accuracy, and where it pays."""
