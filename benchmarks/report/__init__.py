"""The page and the pictures that are made from results."""
