"""The engines that train it: polyshard with any stack, torch's, one process."""
