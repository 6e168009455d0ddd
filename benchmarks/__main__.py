"""``python -m benchmarks``: the suite. Ranks do not import this file, and so no pictures."""

import sys

from benchmarks.suite import main

sys.exit(main())
