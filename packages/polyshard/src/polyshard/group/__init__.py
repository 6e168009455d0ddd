"""The life of one parameter group, and the plan it follows."""
