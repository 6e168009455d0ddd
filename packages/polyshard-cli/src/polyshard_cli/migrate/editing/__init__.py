"""Changing: what is to be changed is collected first, and done to the tree at once."""
