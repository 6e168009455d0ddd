"""What can be wrong with the simulated device itself."""

__all__ = ["SimError"]


class SimError(RuntimeError):
    """The device cannot be built or enabled; the message says why and what to do."""
