"""A simulated object store: S3 and GCS over HTTP, with a service's latencies, limits and faults.

    async with simulator("s3", faults=[Fault(kind="put_object", number=3, status=503)]) as sim:
        fs = S3FileSystem(**sim.s3_options(), asynchronous=True)
        ...
        assert [r.status for r in sim.requests if r.kind == "put_object"][2] == 503

It runs in a thread with an event loop of its own; `with` and `async with` both do. For benchmarks,
`simulator_process` runs it in another process, and so does `python -m
asyncckpt.testing.objectstore`. It listens on 127.0.0.1 only and keeps everything in memory.
"""

from asyncckpt.testing.objectstore.credentials import Credentials
from asyncckpt.testing.objectstore.faults import Fault, Gate, Signal
from asyncckpt.testing.objectstore.process import SimulatorProcess, simulator_process
from asyncckpt.testing.objectstore.profiles import GCS, LOOPBACK, PROFILES, S3, Profile
from asyncckpt.testing.objectstore.requests import Logged, Request
from asyncckpt.testing.objectstore.running import Simulator, Stats
from asyncckpt.testing.objectstore.running import Simulator as simulator

__all__ = [
    "GCS",
    "LOOPBACK",
    "PROFILES",
    "S3",
    "Credentials",
    "Fault",
    "Gate",
    "Logged",
    "Profile",
    "Request",
    "Signal",
    "Simulator",
    "SimulatorProcess",
    "Stats",
    "simulator",
    "simulator_process",
]
