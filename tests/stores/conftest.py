"""Which of these tests run where."""

import sys

# Built on LD_PRELOAD and /proc.
collect_ignore = [] if sys.platform == "linux" else ["test_crash_points.py"]
