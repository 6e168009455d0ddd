"""What travels between ranks: parameters gathered, gradients reduced."""
