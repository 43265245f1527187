"""Sizes, samples and grids of each form of the suite."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.remote.results import BACKGROUND, RESTORE, SAVE, SCENARIOS

MIB = 1 << 20
WORKLOADS = ("W1", "W3", "W4")


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        name: of the form.
        nbytes: of W1 and W3.
        small: leaves of W4.
        samples: of ours and of bare clients.
        peer_samples: of peers on W1.
        slow_samples: of peers that take tens of seconds, and of all of them on other workloads.
        lag_samples: of saves in the background.
        peers: which of them are measured.
        grid_sizes: of objects that the bare clients put.
        range_sizes: of ranges that they read.
        grid_streams: requests in flight of them.
        grid_samples: of each point of the grid, of which the fastest counts.
        sweep_sizes: of data files.
        sweep_streams: of uploads.
        sweep_samples: of every point; the best few get `samples`.
        finalists: how many points those are.
        large_nbytes: of the state that is larger than the small budget.
        budget_nbytes: the small budget.
        budget_samples: processes that save it.
        steady_s: seconds for which samples with unsteady floors are taken again, by scenario.
        limit_s: after which no scenario begins any more.
        workloads: that are measured.
        scenarios: that are measured.
    """

    name: str
    nbytes: int
    small: int
    samples: int
    peer_samples: int
    slow_samples: int
    lag_samples: int
    peers: tuple[str, ...]
    grid_sizes: tuple[int, ...]
    range_sizes: tuple[int, ...]
    grid_streams: tuple[int, ...]
    grid_samples: int
    sweep_sizes: tuple[int, ...]
    sweep_streams: tuple[int, ...]
    sweep_samples: int
    finalists: int
    large_nbytes: int
    budget_nbytes: int
    budget_samples: int
    steady_s: float
    limit_s: float
    workloads: tuple[str, ...] = WORKLOADS
    scenarios: tuple[str, ...] = SCENARIOS


PEERS = ("tensorstore", "dcp", "s3torchconnector", "safetensors", "orbax")

QUICK = Form(
    name="quick",
    nbytes=64 * MIB,
    small=1_000,
    samples=3,
    peer_samples=1,
    slow_samples=1,
    lag_samples=1,
    peers=PEERS,
    grid_sizes=(8 * MIB, 32 * MIB),
    range_sizes=(8 * MIB,),
    grid_streams=(8, 16),
    grid_samples=2,
    sweep_sizes=(8 * MIB, 16 * MIB, 32 * MIB),
    sweep_streams=(4, 16),
    sweep_samples=1,
    finalists=2,
    large_nbytes=512 * MIB,
    budget_nbytes=128 * MIB,
    budget_samples=1,
    steady_s=0.0,
    limit_s=3600.0,
)

SHORT = Form(
    name="short",
    nbytes=512 * MIB,
    small=10_000,
    samples=5,
    peer_samples=2,
    slow_samples=1,
    lag_samples=3,
    peers=("tensorstore",),
    grid_sizes=(8 * MIB, 16 * MIB),
    range_sizes=(8 * MIB, 16 * MIB),
    grid_streams=(16, 32),
    grid_samples=2,
    sweep_sizes=(8 * MIB, 16 * MIB, 32 * MIB),
    sweep_streams=(16, 32),
    sweep_samples=1,
    finalists=2,
    large_nbytes=2048 * MIB,
    budget_nbytes=256 * MIB,
    budget_samples=1,
    steady_s=2.0,
    limit_s=300.0,
    workloads=("W1",),
    scenarios=(SAVE, RESTORE, BACKGROUND),
)

FULL = Form(
    name="full",
    nbytes=1024 * MIB,
    small=10_000,
    samples=9,
    peer_samples=5,
    slow_samples=3,
    lag_samples=5,
    peers=PEERS,
    grid_sizes=(8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB),
    range_sizes=(4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB),
    grid_streams=(8, 16, 32, 64),
    grid_samples=5,
    sweep_sizes=(8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB),
    sweep_streams=(4, 8, 16, 32, 64),
    sweep_samples=3,
    finalists=5,
    large_nbytes=2048 * MIB,
    budget_nbytes=256 * MIB,
    budget_samples=3,
    steady_s=60.0,
    limit_s=2 * 3600.0,
)

FORMS = {form.name: form for form in (QUICK, SHORT, FULL)}
