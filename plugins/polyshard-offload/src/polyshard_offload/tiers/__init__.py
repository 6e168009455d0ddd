"""Where bytes rest: host memory and files of the swap."""
