"""Cases on an object store: floors between samples, CPU seconds of client and service.

The floor is probed between any two samples, so that each has a probe right before and one right
after it. On an unshaped service, where probes that differ mean a machine that was not steady, such
a sample is taken again; a shaped one draws its latencies, and its probes differ for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks import measure
from benchmarks.measure import SPARE, Sample
from tests.simulator import SimulatorProcess


@dataclass(slots=True)
class Probes:
    """The service that cases share, and the probes of the floor between their samples.

    Attributes:
        service: that all of them use.
        floor: seconds of the floor; None where there is none.
        last_s: the last probe.
    """

    service: SimulatorProcess
    floor: Callable[[], float] | None = None
    last_s: float | None = None

    def probe(self) -> float | None:
        """Probe the floor; return None without one."""
        self.last_s = None if self.floor is None else self.floor()
        return self.last_s


@dataclass(slots=True, kw_only=True)
class Case(measure.Case):
    """One case in a process of its own, which measures CPU seconds and memory itself.

    Attributes:
        probes: those of all cases of the scenario.
        after: further figures of the run, asked for before anything else happens.
    """

    probes: Probes
    after: Callable[[], Mapping[str, float]] = dict

    def attempt(self, *, with_floor: bool) -> Sample:
        """Run once; what was stored is gone before the floor is probed again."""
        probes = self.probes
        if with_floor and probes.last_s is None:
            probes.probe()
        before_s = probes.last_s
        SPARE.free(self.fresh_nbytes)
        probes.service.reset()
        try:
            values = dict(self.run())
            stats = probes.service.stats()
            values["server_cpu_s"] = stats["cpu_s"]
            values["requests"] = stats["requests"]
            values["in_flight"] = stats["max_in_flight"]
            values.update(self.after())
        finally:
            self.finish()
        after_s = probes.probe() if with_floor else None
        SPARE.hold(self.fresh_nbytes)
        return Sample(
            wall_s=values.pop("wall_s"),
            cpu_s=values.pop("cpu_s"),
            extra_nbytes=int(values.pop("extra_nbytes")),
            floor_before_s=before_s,
            floor_after_s=after_s,
            values=values,
        )
