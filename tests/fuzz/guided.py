"""The same targets under atheris, which is guided by the coverage of the decoders.

`python -m tests.fuzz.guided TARGET [-runs=N …]` takes libFuzzer's options and needs the package
atheris, which nothing else here does. What led to new code is
kept in `fuzz-corpus/TARGET` and is where the next run goes on; what failed is kept as `crash-…`,
`timeout-…` or `oom-…` in the working directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["asyncckpt.format", "asyncckpt.tree"]):
    from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
    from tests.fuzz.targets import targets

RSS_MIB = 2048
"""Of the process, which also holds the corpus and the instrumentation."""


def main(name: str, options: list[str]) -> None:
    """Fuzzes until libFuzzer ends the process."""
    target = targets()[name]
    corpus = Path("fuzz-corpus") / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(data)

    def decode(data: bytes) -> None:
        try:
            target.decode(data)
        except (CorruptCheckpointError, UnsupportedFormatError):
            pass

    def mutate(data: bytes, max_nbytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return atheris.Mutate(data, max_nbytes)
        return target.mutated(data, random, [*target.seeds])[:max_nbytes]

    limits = ["-timeout=1", f"-rss_limit_mb={RSS_MIB}", "-malloc_limit_mb=128", "-max_len=65536"]
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], decode, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
