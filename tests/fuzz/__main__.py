"""`python -m tests.fuzz`: feed many mutated inputs to the decoders.

Prints one line per decoder. Exit status 1 if any input led to anything but a result, a
`CorruptCheckpointError` or an `UnsupportedFormatError`, or took more than a second or more memory
than four times its size and 64 MiB; such inputs are kept in a directory.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from tests.fuzz.engine import fuzz, keep
from tests.fuzz.targets import targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all without")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other inputs")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    known = targets()
    unknown = [name for name in options.targets if name not in known]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    gc.freeze()
    failed = False
    for name in options.targets or known:
        outcome = fuzz(known[name], options.inputs, seed=options.seed)
        print(f"{name:14} {outcome}", flush=True)
        for path, (_, error) in zip(
            keep(known[name], outcome, options.failures) if outcome.failures else [],
            outcome.failures,
            strict=False,
        ):
            print(f"{path}:\n{error}", file=sys.stderr)
        failed |= bool(outcome.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
