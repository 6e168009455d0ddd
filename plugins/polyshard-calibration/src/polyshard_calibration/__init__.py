"""Choose how each parameter travels by measured costs instead of built-in thresholds."""

from polyshard_calibration.__about__ import __version__
from polyshard_calibration.plugin import Calibration
from polyshard_calibration.threshold import BreakEven, Timing

__all__ = ["BreakEven", "Calibration", "Timing", "__version__"]
