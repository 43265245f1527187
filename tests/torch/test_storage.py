"""The plug-ins in one process: what they store and read, and other readers of it."""

from __future__ import annotations

import collections
import io
import logging
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import asyncckpt
from asyncckpt import RestoreOptions, blocking, errors
from asyncckpt.torch import StorageReader, StorageWriter
from asyncckpt.torch.dcp_metadata import NAME
from asyncckpt.torch.load import sharing
from tests import children
from tests.processes.values import array
from tests.torch.cases import differing, plain, read, state, write
from tests.torch.failure_cases import joined, left

AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def failures(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """The only failure of a call of DCP."""
    ((failure, _),) = error.value.failures.values()
    return failure


async def test_it_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    tree = state(1)
    write("save", tree, StorageWriter(path), None)
    assert (await asyncckpt.verify(path)).ok
    info = await asyncckpt.inspect(path)
    assert info.metadata.keys() == {NAME}
    restored = await asyncckpt.restore(path)
    assert np.array_equal(restored["model.weight"], tree["model"]["weight"].numpy())
    assert restored["groups.0.betas"] == (0.9, 1)
    assert restored["bytes"] == tree["bytes"]
    spec = info["model.weight"].tensorstore_spec()
    import tensorstore

    opened = await tensorstore.open(spec, read=True)
    assert np.array_equal(await opened.read(), tree["model"]["weight"].numpy())


def test_every_dtype_returns_bit_by_bit(tmp_path: Path) -> None:
    from asyncckpt.adapters.torch import TORCH_DTYPES

    generator = torch.Generator().manual_seed(0)
    tree = {
        name: torch.randint(0, 2, (7, 5), generator=generator).to(dtype)
        for name, dtype in TORCH_DTYPES.items()
    }
    path = str(tmp_path / "1")
    write("save", tree, StorageWriter(path), None)
    target = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    read(target, StorageReader(path))
    for name, tensor in tree.items():
        assert target[name].dtype == tensor.dtype
        assert torch.equal(target[name].view(torch.uint8), tensor.view(torch.uint8))


def test_why_orbax_cannot_read_a_checkpoint_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "asyncckpt"):
        write("save", {"blob": b"short"}, StorageWriter(str(tmp_path / "1")), None)
    assert "blob: Orbax cannot hold this bytes" in caplog.text


def test_chosen_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    write("save", state(1), StorageWriter(path), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some = _load_state_dict_from_keys({"model", "bytes"}, storage_reader=StorageReader(path))
        every = _load_state_dict_from_keys(storage_reader=StorageReader(path))
    wanted = plain(state(1))
    assert differing(plain(every), wanted) == []
    assert differing(plain(some), {key: wanted[key] for key in ("model", "bytes")}) == []


def test_a_state_dict_that_asyncckpt_has_saved_is_loaded(tmp_path: Path) -> None:
    """Also with keys of JAX or NumPy, lists, and optimizers whose state has integer keys."""
    path = str(tmp_path / "1")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tree = {"model": model, "opt": optimizer, "host": np.arange(4), "step": 3, "b": b"x" * 5000}
    blocking.save(path, tree)
    wanted = {key: v.state_dict() if hasattr(v, "state_dict") else v for key, v in tree.items()}
    target: Any = {
        "model": {key: torch.zeros_like(v) for key, v in model.state_dict().items()},
        "opt": torch.optim.Adam(model.parameters()).state_dict(),
        "host": torch.zeros(4, dtype=torch.int64),
        "step": 0,
        "b": b"",
    }
    target["opt"]["state"] = {
        key: {name: torch.zeros_like(v) for name, v in moments.items()}
        for key, moments in optimizer.state_dict()["state"].items()
    }
    read(target, StorageReader(path))
    assert differing(plain(target), plain({**wanted, "host": torch.arange(4)})) == []


def test_tensors_in_tuples_that_asyncckpt_has_saved_are_loaded(tmp_path: Path) -> None:
    """DCP takes a tuple as one value; states of optax are tuples."""
    path = str(tmp_path / "1")
    moments = ({"mu": torch.ones(3), "nu": [torch.full((2,), 2.0, dtype=torch.bfloat16)]}, 5)
    blocking.save(path, {"opt": moments, "w": torch.ones(2), "host": (np.arange(4), b"x" * 5000)})
    target: Any = {"opt": None, "w": torch.zeros(2), "host": None}
    read(target, StorageReader(path))
    assert differing(plain(target["opt"]), plain(moments)) == []
    assert torch.equal(target["host"][0], torch.arange(4)) and target["host"][1] == b"x" * 5000
    assert torch.equal(target["w"], torch.ones(2))


def test_paths_that_have_one_key_in_dcp_are_an_error_that_names_the_checkpoint(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "1")
    blocking.save(path, {"a": {"b": torch.ones(3)}, "a.b": 1})
    with pytest.raises(errors.UnsupportedFormatError, match="duplicated flatten") as failed:
        StorageReader(path).read_metadata()
    assert failed.value.location == path and "asyncckpt.restore" in str(failed.value)


@pytest.mark.parametrize("kind", ["sparse", "freed"])
def test_the_error_for_a_tensor_without_plain_memory_names_its_key(
    tmp_path: Path, kind: str
) -> None:
    tensor = torch.ones(3)
    if kind == "freed":
        tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointException) as failed:
        write(
            "save",
            {"w": tensor.to_sparse() if kind == "sparse" else tensor},
            StorageWriter(str(tmp_path / "1")),
            None,
        )
    failure = failures(failed)
    assert isinstance(failure, errors.UnsupportedLeafError)
    assert str(failure).startswith("w: ") and "tensor" in str(failure)


def test_it_keeps_shards_and_paths_of_the_plan(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    write("save", {"a": {"b": [torch.ones(3), 1]}, "c": None}, StorageWriter(path), None)
    metadata = StorageReader(path).read_metadata()
    assert metadata.version == CURRENT_DCP_VERSION
    assert metadata.planner_data == {"a.b.0": ("a", "b", 0), "a.b.1": ("a", "b", 1), "c": ("c",)}
    described = metadata.state_dict_metadata["a.b.0"]
    assert isinstance(described, TensorStorageMetadata)
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in described.chunks] == [((0,), (3,))]
    assert described.properties.dtype is torch.float32


def test_a_planner_that_flattens_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    tree = {"a/b.c": torch.ones(3), "d": {"x": (1, [None, b"\0"])}}
    write("save", tree, StorageWriter(path), DefaultSavePlanner(**AS_IT_IS))
    assert StorageReader(path).read_metadata().planner_data is None
    target = {"a/b.c": torch.zeros(3), "d": None}
    read(target, StorageReader(path), dcp.DefaultLoadPlanner(**AS_IT_IS))
    assert torch.equal(target["a/b.c"], torch.ones(3))  # type: ignore[arg-type]
    assert target["d"] == tree["d"]


# ----------------------------------------------------------------------------- values


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Evil.path),)

    path = Path()


def test_a_value_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    Evil.path = tmp_path / "executed"
    path = str(tmp_path / "run" / "1")
    with pytest.raises(CheckpointException) as caught:
        write("save", {"good": 1, "bad": Evil()}, StorageWriter(path), None)
    error = failures(caught)
    assert isinstance(error, errors.UnsupportedLeafError)
    assert error.path == "bad"
    assert str(error).startswith("bad: this value holds the global 'posix.mkdir', which cannot be")
    assert 'opaque="allow"' in str(error)
    assert list(tmp_path.iterdir()) == [] or not any((tmp_path / "run").iterdir())


async def test_opaque_values_return_by_dcp_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    tree = {"io": io.BytesIO(b"abc" * 2000), "set": {1, 2}, "w": torch.ones(2), "n": 1}
    write("save", tree, StorageWriter(path, opaque="allow"), None)
    target: Any = {"io": None, "set": None, "w": torch.zeros(2), "n": 0}
    read(target, StorageReader(path))
    assert target["io"].getvalue() == b"abc" * 2000
    assert (target["set"], target["n"]) == ({1, 2}, 1)
    restored = await asyncckpt.restore(path)
    assert isinstance(restored["set"], bytes)  # nothing is unpickled
    with pytest.raises(errors.UsageError, match="opaque='yes': pass"):
        StorageWriter(path, opaque="yes")  # type: ignore[arg-type]


def test_dicts_of_other_classes_become_dicts(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    tree = {"o": [collections.OrderedDict(a=1)], "size": torch.Size((2, 3))}
    write("save", tree, StorageWriter(path), DefaultSavePlanner(**AS_IT_IS))
    target: Any = {"o": None, "size": None}
    read(target, StorageReader(path), dcp.DefaultLoadPlanner(**AS_IT_IS))
    assert target == {"o": [{"a": 1}], "size": (2, 3)}


# ----------------------------------------------------------------------------- targets


def test_tied_weights_are_loaded_into_their_one_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    weight = torch.from_numpy(array("w", (64, 8)))
    write("save", {"a": weight, "b": weight, "c": weight[3:5]}, StorageWriter(path), None)
    target = torch.zeros(64, 8)
    read({"a": target, "b": target, "c": target[3:5]}, StorageReader(path))
    assert torch.equal(target, weight)


def test_targets_that_share_memory_get_values_as_if_read_one_by_one(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    values = torch.from_numpy(array("w", (16, 9)))
    names = [f"k{number}" for number in range(9)]
    write("save", dict(zip(names, values.T, strict=True)), StorageWriter(path), None)
    columns, one = torch.zeros(16, 9), torch.zeros(16)
    assert sharing([[column] for column in columns.T]) == []
    read(dict(zip(names, columns.T, strict=True)), StorageReader(path))
    assert torch.equal(columns, values)
    assert sharing([[one], [torch.zeros(3)], [one], [one[3:]]]) == [2, 3]
    read(dict.fromkeys(names, one), StorageReader(path))
    assert torch.equal(one, values[:, -1])  # that of the last key, as if read one by one


def test_targets_that_share_memory_are_read_whatever_the_default_device(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    weight = torch.from_numpy(array("w", (64, 8)))
    write("save", {"a": weight, "b": weight}, StorageWriter(path), None)
    target = torch.zeros(64, 8)
    with torch.device("meta"):
        read({"a": target, "b": target}, StorageReader(path))
    assert torch.equal(target, weight)


def test_another_dtype_is_an_error_unless_it_may_be_cast(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    write("save", {"w": torch.tensor([1.5, 2.0])}, StorageWriter(path), None)
    with pytest.raises(CheckpointException) as caught:
        read({"w": torch.zeros(2, dtype=torch.bfloat16)}, StorageReader(path))
    assert isinstance(failures(caught), errors.DtypeMismatchError)
    target = torch.zeros(2, dtype=torch.bfloat16)
    read({"w": target}, StorageReader(path, cast=True))
    assert target.tolist() == [1.5, 2.0]


def test_a_reader_that_works_alone_refuses_to_broadcast(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    write("save", {"w": torch.ones(3)}, StorageWriter(path), None)
    reader = StorageReader(path, options=RestoreOptions(broadcast=True))
    with pytest.raises(CheckpointException) as caught:
        read({"w": torch.zeros(3)}, reader)
    assert "exchanges nothing" in str(failures(caught))


def test_parameters_are_filled_in_place_and_autograd_notices(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    model = torch.nn.Linear(3, 2)
    write("save", model.state_dict(), StorageWriter(path), None)
    other = torch.nn.Linear(3, 2)
    loss = (other.weight * other.weight).sum()
    before = other.weight.data_ptr()
    read(dict(other.named_parameters()), StorageReader(path))
    assert other.weight.data_ptr() == before
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_checkpoint_that_was_replaced_is_not_mixed(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    write("save", {"w": torch.ones(3)}, StorageWriter(path), None)

    class Slow(StorageReader):
        def read_metadata(self) -> Any:
            metadata = super().read_metadata()
            write("save", {"w": torch.zeros(3)}, StorageWriter(path, overwrite=True), None)
            return metadata

    with pytest.raises(CheckpointException) as caught:
        read({"w": torch.zeros(3)}, Slow(path))
    assert isinstance(failures(caught), errors.CheckpointNotFoundError)
    assert "was replaced while being loaded" in str(failures(caught))


def test_a_damaged_layout_is_named(tmp_path: Path) -> None:
    for number, damage in enumerate(
        (
            {"version": 2},
            {"shards": {"w": [[[0], [2]]]}},
            {"shards": {"w": [[[0], [1 << 70]]]}},
            {"shards": {"w": [[[0], [3]], [[0], [0]]]}},
            {"paths": 1},
            {"opaque": [["w"]]},
        )
    ):
        path = tmp_path / str(number)
        kept = {"version": 1, "paths": None, "shards": {}, "opaque": [], **damage}
        blocking.save(path, {"w": torch.ones(3)}, metadata={NAME: kept})
        with pytest.raises(errors.CorruptCheckpointError, match="is malformed"):
            StorageReader(path).read_metadata()


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (np.zeros(3), "the tree is not a dict"),
        ([np.zeros(3)], "the tree is not a dict"),
        ({1: np.zeros(3), "1": np.zeros(3)}, "two keys of the tree have the same text"),
    ],
)
def test_a_layout_for_another_tree_is_named(tmp_path: Path, tree: Any, reason: str) -> None:
    layout = {"version": 1, "paths": None, "shards": {}, "opaque": []}
    blocking.save(tmp_path / "1", tree, metadata={NAME: layout})
    with pytest.raises(errors.CorruptCheckpointError, match=rf"is malformed \({reason}\)"):
        StorageReader(tmp_path / "1").read_metadata()


# ------------------------------------------------------------------------- the plug-ins


def test_the_writer_can_be_pickled_before_and_after_a_save(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "1", overwrite=True)
    for _ in range(2):
        writer = pickle.loads(pickle.dumps(writer))
        write("save", {"w": torch.ones(3)}, writer, None)


def test_checkpoint_ids(tmp_path: Path) -> None:
    for kind in (StorageReader, StorageWriter):
        assert kind.validate_checkpoint_id(tmp_path)
        assert kind.validate_checkpoint_id("s3://bucket/run/1")
        assert not kind.validate_checkpoint_id("nowhere://bucket/run/1")
        assert not kind.validate_checkpoint_id("")
    writer, reader = StorageWriter("elsewhere"), StorageReader("elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in ("1", "2"):
            tree = {"w": torch.full((3,), float(step))}
            dcp.save(tree, checkpoint_id=tmp_path / step, storage_writer=writer)
        target = {"w": torch.zeros(3)}
        dcp.load(target, checkpoint_id=tmp_path / "1", storage_reader=reader)
    assert target["w"].tolist() == [1.0] * 3
    assert (writer.checkpoint_id, reader.checkpoint_id) == (tmp_path / "2", tmp_path / "1")
    assert repr(reader) == f"StorageReader({str(tmp_path / '1')!r})"


# ------------------------------------------------------------------------- without finish


def written(writer: StorageWriter) -> tuple[Any, Any]:
    """Call a writer as DCP does, up to and without `finish`; return its arguments."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    return metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()]


def test_a_save_without_finish_ends_with_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "run" / "1"
    writers = [StorageWriter(path)]
    written(writers[0])
    assert left(path) != []
    writers.clear()
    assert joined() == []
    assert left(path) == []
    assert not path.exists()


def test_a_save_whose_finish_does_not_come_in_time_ends_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "run" / "1"
    writer = StorageWriter(path, options=asyncckpt.SaveOptions(arrival_s=0.2))
    given = written(writer)
    assert joined() == []  # the save ends, and with it the threads
    assert left(path) == []
    with pytest.raises(errors.SaveError, match=r"did not call finish\(\) within 0.2 s"):
        writer.finish(*given)
    assert not path.exists()


def test_without_pytorch_the_plug_ins_say_what_to_install() -> None:
    out = children.output(
        """
        import sys
        sys.modules["torch"] = None
        import asyncckpt
        for use in (lambda: asyncckpt.torch, lambda: __import__("asyncckpt.torch")):
            try:
                use()
            except ModuleNotFoundError as error:
                print(error.name, error)
        """
    )
    assert out == 2 * 'torch asyncckpt.torch needs PyTorch: pip install "asyncckpt[torch]"\n'
