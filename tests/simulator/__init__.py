"""A simulated object store: S3 and GCS over HTTP, with a service's latencies, limits and faults.

    async with simulator("s3", faults=[Fault(kind="put_object", number=3, status=503)]) as sim:
        fs = S3FileSystem(**sim.s3_options(), asynchronous=True)
        ...
        assert [r.status for r in sim.requests if r.kind == "put_object"][2] == 503

It runs in a thread with an event loop of its own; `with` and `async with` both do. Benchmarks use
`simulator_process`, which runs it in another process. It listens on 127.0.0.1 only and keeps
everything in memory. `dialects/` holds the APIs of S3 and GCS; the rest knows neither.
"""

from tests.simulator.dialects.credentials import Credentials
from tests.simulator.faults import Fault, Gate, Signal
from tests.simulator.process import SimulatorProcess, simulator_process
from tests.simulator.profiles import GCS, LOOPBACK, PROFILES, S3, Profile
from tests.simulator.requests import Request
from tests.simulator.running import Simulator
from tests.simulator.running import Simulator as simulator
from tests.simulator.server import Stats

__all__ = [
    "GCS",
    "LOOPBACK",
    "PROFILES",
    "S3",
    "Credentials",
    "Fault",
    "Gate",
    "Profile",
    "Request",
    "Signal",
    "Simulator",
    "SimulatorProcess",
    "Stats",
    "simulator",
    "simulator_process",
]
