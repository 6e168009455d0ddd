"""The codecs the engine is given: of all-gathers, and of reductions."""
