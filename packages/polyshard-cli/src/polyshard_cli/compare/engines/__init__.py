"""Who trains it: polyshard with any stack, torch's engines, one process."""
