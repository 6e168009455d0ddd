"""What a user asks for, checked against a model and applied to it."""
