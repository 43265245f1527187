"""`python -m asyncckpt.testing.objectstore`: serve until interrupted."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Sequence

from asyncckpt.options import GIB
from asyncckpt.testing.objectstore.profiles import PROFILES, profile_of, with_overrides
from asyncckpt.testing.objectstore.running import Simulator
from asyncckpt.testing.objectstore.service import MD5_MAX_NBYTES, PART_MIN_NBYTES


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="python -m asyncckpt.testing.objectstore",
        description="A simulated object store with an S3 and a GCS endpoint, on 127.0.0.1.",
    )
    add = found.add_argument
    add("--profile", choices=sorted(PROFILES), default="loopback")
    add(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="change one field of the profile, such as put_latency_s=0.1 or get_bandwidth=none",
    )
    add("--bucket", action="append", help="created at the start; by default one named bucket")
    add("--port", "--s3-port", dest="s3_port", type=int, default=0, help="0: a free one")
    add("--gcs-port", type=int, default=0, help="0: a free one")
    add("--region", help="requests that are signed for another one are refused")
    add("--part-min-nbytes", type=int, default=PART_MIN_NBYTES)
    add("--md5-max-nbytes", type=int, default=MD5_MAX_NBYTES)
    flag = argparse.BooleanOptionalAction
    add("--verify-checksums", action=flag, default=True)
    add("--keep-log", action=flag, default=True)
    add(
        "--spare-nbytes",
        type=int,
        default=2 * GIB,
        help="room of objects that are gone that is kept for new ones",
    )
    add("--until-eof", action="store_true", help="end with the standard input")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the endpoints as one line of JSON and serve."""
    options = parser().parse_args(arguments)
    overrides = dict(text.partition("=")[::2] for text in options.set)
    simulator = Simulator(
        with_overrides(profile_of(options.profile), overrides),
        buckets=options.bucket or ["bucket"],
        region=options.region,
        part_min_nbytes=options.part_min_nbytes,
        md5_max_nbytes=options.md5_max_nbytes,
        verify_checksums=options.verify_checksums,
        keep_log=options.keep_log,
        s3_port=options.s3_port,
        gcs_port=options.gcs_port,
        spare_nbytes=options.spare_nbytes,
        own_process=True,
    )
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with simulator:
        endpoints = {
            "s3": simulator.s3_endpoint,
            "gcs": simulator.gcs_endpoint,
            "control": simulator.control_endpoint,
            "region": simulator.region,
            "profile": simulator.profile.name,
        }
        print(json.dumps(endpoints), flush=True)
        if options.until_eof:
            with contextlib.suppress(OSError, ValueError):
                sys.stdin.buffer.read()
        else:
            stopped.wait()


if __name__ == "__main__":
    main()
