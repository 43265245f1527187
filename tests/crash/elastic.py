"""A script for torchrun: a job that is killed in its first life, and looks around in its second.

    python -m torch.distributed.run --nproc-per-node 2 --max-restarts 1 tests/crash/elastic.py DIR

In its first life, process 1 dies while step 2 is being saved. In the second, the store still has
the keys of the first. Every process leaves what it has found in DIR.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend without collectives
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from asyncckpt import SaveOptions, blocking
from asyncckpt.coordinators.handshake import shake_hands
from asyncckpt.session import processes
from asyncckpt.stores.local.attempt import LocalJoinedAttempt

OPTIONS = SaveOptions(silence_s=5.0, arrival_s=60.0)


def die(*args: object, **keywords: object) -> None:
    """Die."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path) -> None:
    """Live once."""
    torch.set_num_threads(1)
    # No collective is run here. gloo would look for its peers by keys that those of the first life
    # have left, and sometimes connects to them, and waits.
    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group("fake", store=store, rank=rank, world_size=count)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    groups = []

    async def noted(*args: object, **keywords: object) -> object:
        groups.append(await shake_hands(*args, **keywords))  # type: ignore[arg-type]
        return groups[0]

    tree = {"w": torch.full((1000,), 1.0 + life), "host": 7}
    with (
        mock.patch.object(processes, "shake_hands", noted),
        blocking.Checkpointer(directory / "run", save_options=OPTIONS) as ckpt,
    ):
        found = {"latest": ckpt.latest_step(), "run": groups[0].run_id}
        hello = f"{groups[0].meeting}/hello/{rank}/"
        if life == 0:
            ckpt.save(1, tree)
            found["hello"] = hello
            (directory / f"0-{rank}.json").write_text(json.dumps(found))
            if rank == 1:
                mock.patch.object(LocalJoinedAttempt, "settle", die).start()
            ckpt.save(2, tree)
            return
        before = json.loads((directory / f"0-{rank}.json").read_text())
        # The beats of the first life are there, in the store that the second one uses.
        store = distributed_c10d._get_default_store().clone()
        found["kept"] = store.check([f"asyncckpt/{before['run']}/beat/{rank}"])
        found["same_place"] = before["hello"] == hello
        back = ckpt.restore()
        found["restored"] = [float(back["w"][0]), back["host"]]
        ckpt.save(2, tree)
        found["steps"] = ckpt.steps()
    (directory / f"1-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
