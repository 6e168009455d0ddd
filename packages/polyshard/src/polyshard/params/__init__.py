"""The forms of a parameter: original, sharded, unsharded."""
