"""Random models and scripts on real ranks, each against one process: see ``python -m fuzzing``."""
