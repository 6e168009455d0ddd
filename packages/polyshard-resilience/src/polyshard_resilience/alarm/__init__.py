"""When a rank fails, all ranks know within a second, and waiting ranks are woken."""
