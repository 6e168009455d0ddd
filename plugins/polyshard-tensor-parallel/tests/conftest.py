"""Helpers beside the tests can be imported by them, and by the ranks they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
