"""``python -m benchmarks``: the suite, or one measurement by the name of its module."""

import sys

if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    from benchmarks.harness import command

    command(sys.argv.pop(1))
else:  # ranks do not import what draws pictures
    from benchmarks.suite import main

    sys.exit(main())
