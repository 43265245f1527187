"""Orbax at a GCS endpoint of this machine, in a process of its own.

    python orbax_at_gcs.py ENDPOINT BUCKET OURS…

Orbax reaches the endpoint through gcsfs (files) and TensorStore's gcs driver (arrays). It writes
checkpoints in BUCKET/orbax and restores those of ours at the URLs OURS; on standard output are
the sums of the arrays that it found there, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any


def tree() -> dict[str, Any]:
    """What is saved: made here and in the test."""
    import numpy as np

    weights = np.random.default_rng(5).standard_normal((300, 70)).astype(np.float32)
    return {"w": weights, "deep": {"int": np.arange(-3, 4, dtype=np.int8)}, "n": -41, "text": "é"}


def main(bucket: str, ours: list[str]) -> None:
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath

    warnings.simplefilter("ignore")
    root = f"gs://{bucket}/orbax"
    plain = {key: value for key, value in tree().items() if key != "text"}
    ocp.PyTreeCheckpointer().save(f"{root}/zarr2", tree())
    ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(f"{root}/zarr3", tree())
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(f"{root}/directories", tree())
    with ocp.StandardCheckpointer() as standard:
        standard.save(f"{root}/standard", plain)
    with ocp.CheckpointManager(epath.Path(f"{root}/manager")) as manager:
        for step in (1, 12):
            manager.save(step, args=ocp.args.PyTreeSave(tree()))
        manager.wait_until_finished()
    sums = {}
    for url in ours:
        path = epath.Path(url)
        # Orbax counts a step only if its mark stands.
        with ocp.CheckpointManager(path.parent) as manager:
            assert manager.all_steps() == [int(path.name)], manager.all_steps()
            found = manager.restore(int(path.name), args=ocp.args.PyTreeRestore())
        sums[url] = {"w": float(np.asarray(found["w"]).sum(dtype=np.float64)), "n": found["n"]}
    print(json.dumps(sums))


if __name__ == "__main__":
    endpoint = sys.argv[1]
    os.environ["STORAGE_EMULATOR_HOST"] = endpoint
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    os.environ["EPATH_USE_TF"] = "false"
    main(sys.argv[2], sys.argv[3:])
