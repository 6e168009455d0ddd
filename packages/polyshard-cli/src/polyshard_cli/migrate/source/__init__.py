"""Reading: which files, what their names stand for, what a DeepSpeed configuration says."""
