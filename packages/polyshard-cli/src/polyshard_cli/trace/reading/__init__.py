"""What is made of the files of all ranks."""
