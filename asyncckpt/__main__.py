"""`python -m asyncckpt` is the command ``asyncckpt``."""

from __future__ import annotations

import sys

from asyncckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
