"""What is wrong with a call is said at once, and nothing is written."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import blocking, options
from asyncckpt.arguments import absolute
from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.options import GIB, KIB, MIB
from tests.script import Script

TREE = {"w": np.arange(10.0)}

OUT_OF_RANGE: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (
        asyncckpt.SaveOptions,
        "host_memory_nbytes",
        [0, -1, 64 * MIB - 1, (1 << 50) + 1, 1e9, "1GB", True],
    ),
    (asyncckpt.SaveOptions, "chunk_nbytes", [None, 0, 4 * KIB - 1, 16 * GIB + 1, 1e6, True]),
    (
        asyncckpt.SaveOptions,
        "target_data_file_nbytes",
        [None, 0, 8 * MIB - 1, (1 << 42) + 1, "big", 1e9],
    ),
    (asyncckpt.SaveOptions, "concurrency", [None, 0, -1, 1025, 2.0, "many", True]),
    (asyncckpt.SaveOptions, "compression", ["gzip", True, 3]),
    (asyncckpt.SaveOptions, "compression_level", [None, 0, 23, 3.0, True]),
    (asyncckpt.SaveOptions, "direct_io", [None, 1, 0, "yes"]),
    (asyncckpt.SaveOptions, "deadline_s", [0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.SaveOptions, "exit_deadline_s", [None, 0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.SaveOptions, "silence_s", [None, 0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.SaveOptions, "arrival_s", [None, 0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.SaveOptions, "snapshot", [None, "none", True]),
    (asyncckpt.SaveOptions, "on_overlap", [None, "queue"]),
    (asyncckpt.SaveOptions, "on_failed_save", [None, "ignore"]),
    (asyncckpt.SaveOptions, "private", [None, 1, 0, "yes"]),
    (asyncckpt.SaveOptions, "layout", [None, "ragged"]),
    (asyncckpt.SaveOptions, "tree", [None, "other"]),
    (asyncckpt.SaveOptions, "leaf_options", [3, "f", {}]),
    (asyncckpt.RestoreOptions, "concurrency", [None, 0, 1025, 2.0, "many", True]),
    (asyncckpt.RestoreOptions, "atomic", [None, 1, "yes"]),
    (asyncckpt.RestoreOptions, "broadcast", [None, 1, "yes"]),
    (asyncckpt.RestoreOptions, "explain", [None, 1, "yes"]),
    (asyncckpt.RestoreOptions, "deadline_s", [0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.RestoreOptions, "silence_s", [None, 0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.RestoreOptions, "arrival_s", [None, 0, -1, math.nan, math.inf, "1", True]),
    (asyncckpt.RestoreOptions, "host_memory_nbytes", [0, 64 * MIB - 1, 1e9, True]),
    (asyncckpt.LeafOptions, "chunk_nbytes", [0, -1, 16 * GIB + 1, 1.0, True]),
    (asyncckpt.LeafOptions, "chunk_shape", [(0,), (-1, 2), (1.0,), 5, "ab", (True,), [2]]),
    (asyncckpt.LeafOptions, "dtype", [3, "float", "f4", []]),
    (asyncckpt.LeafOptions, "compression", ["gzip", True]),
    (asyncckpt.LeafOptions, "compression_level", [0, 23, 3.0, True]),
    (asyncckpt.LeafOptions, "replicas", [None, "", "last", True]),
    (asyncckpt.KeepLast, "n", [0, -1, 1.5, "3", True, None]),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(kind, name, value, id=f"{kind.__name__}.{name}={value!r}")
        for kind, name, values in OUT_OF_RANGE
        for value in values
    ],
)
def test_an_option_out_of_range_fails_where_it_is_made(
    kind: Callable[..., Any], name: str, value: Any
) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**{name: value})
    text = str(caught.value)
    assert repr(value) in text
    assert "pass" in text
    assert name in text or kind is asyncckpt.KeepLast


def test_every_option_has_been_tried() -> None:
    import dataclasses

    tried = {(kind, name) for kind, name, _ in OUT_OF_RANGE}
    for kind in (asyncckpt.SaveOptions, asyncckpt.RestoreOptions, asyncckpt.LeafOptions):
        names = {field.name for field in dataclasses.fields(kind)}
        assert names == {name for k, name in tried if k is kind}


class Colour(enum.IntEnum):
    RED = 1


class Number(float):
    pass


@pytest.mark.parametrize(
    ("leaf", "hint"),
    [
        (object(), "convert it to an array, a scalar, str or bytes"),
        ({1, 2}, r"store sorted\(value\)"),
        (bytearray(b"x"), r"store bytes\(value\)"),
        (Colour.RED, "store its value"),
        (Number(1.0), r"subclass of float: store float\(value\)"),
        (lambda: None, "code is not stored"),
        (int, "classes are not stored"),
        (np.array([object()]), "store a list of its items"),
        (np.array(["a"]), r"store x\.tolist\(\)"),
        (np.ma.masked_array([1.0]), "masked arrays cannot be stored"),
        (np.zeros(2, [("a", "f4")]), "one array per field"),
        (np.longdouble(1), "cast it to float64"),
        (np.datetime64(1, "s"), r"x\.astype\('int64'\)"),
        (np.zeros((1,) * 33), "33 dimensions, checkpoints store at most 32; reshape it"),
    ],
)
async def test_an_unsupported_leaf_is_named_and_told_what_to_do(
    tmp_path: Path, leaf: Any, hint: str
) -> None:
    tree = {"ok": np.zeros(3), "model": [1, {"bad": leaf}]}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for call in (
            lambda: ckpt.save(1, tree),
            lambda: ckpt.start_save(1, tree),
            lambda: ckpt.prepare(tree),
            lambda: asyncckpt.save(tmp_path / "one", tree),
        ):
            with pytest.raises(UnsupportedLeafError, match=f"model/1/bad: .*{hint}") as caught:
                await call()
            assert caught.value.path == "model/1/bad"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", [1.5, None, (1, 2), b"x", True, np.int64(3)])
async def test_an_unsupported_key_is_named(tmp_path: Path, key: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"model: key .* keys are str or int") as caught:
        await asyncckpt.save(tmp_path / "x", {"model": {key: 1}})
    assert caught.value.path == "model"
    assert list(tmp_path.iterdir()) == []


async def test_a_tree_that_holds_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["b"] = tree
    with pytest.raises(UsageError, match="a/b"):
        await asyncckpt.save(tmp_path / "x", tree)


async def test_an_array_of_the_highest_rank_is_saved(tmp_path: Path) -> None:
    tree = {"w": np.arange(4.0).reshape((1,) * 30 + (2, 2))}
    await asyncckpt.save(tmp_path / "x", tree)
    restored = await asyncckpt.restore(tmp_path / "x")
    assert restored["w"].shape == tree["w"].shape and (restored["w"] == tree["w"]).all()


async def test_leaves_whose_names_would_collide_are_told_apart(tmp_path: Path) -> None:
    tree = {
        "a": {"b": np.float32(1), "b.c": np.float32(2)},
        "a.b": {"c": np.float32(3)},
        "a/b": np.float32(4),
        "a%2Fb": np.float32(5),
        1: np.float32(6),
        "1": np.float32(7),
        "": {"": np.float32(8)},
        "..": {".": np.float32(9)},
        "nul\0": np.float32(10),
        "Ä": {"ß": np.float32(11)},
    }
    await asyncckpt.save(tmp_path / "x", tree)
    restored = await asyncckpt.restore(tmp_path / "x")
    assert list(restored) == list(tree)
    assert restored == tree
    info = await asyncckpt.inspect(tmp_path / "x")
    arrays = [leaf.array for leaf in info.leaves]
    assert len(set(arrays)) == len(arrays) == 11
    assert (await asyncckpt.verify(tmp_path / "x")).ok


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"x": object()}, r"^metadata\['x'\] is not JSON .*not JSON serializable"),
        ({"a": {}, "x": math.nan}, r"^metadata\['x'\] is not JSON .*not JSON compliant"),
        ({"x": [0, {"y": ({1, 2},)}]}, r"^metadata\['x'\]\[1\]\['y'\]\[0\] is not JSON"),
        ({"x": {"\ud800": 1}}, r"^the key of metadata\['x'\]\['\\ud800'\] is not .*surrogates"),
        ({"\ud800": 1}, r"^the key of metadata\['\\ud800'\] is not JSON .*surrogates"),
        ({"n": 10**5000}, r"^metadata\['n'\] is not JSON .*digits"),
        ({(1, 2): 3}, r"^metadata has the key \(1, 2\); keys are strings"),
        ({1: "a", "1": "b"}, r"^metadata has the key 1; keys are strings"),
        ({"a": [0, {"b": {None: 1}}]}, r"^metadata\['a'\]\[1\]\['b'\] has the key None"),
        ({"a": (True, {2.5: 1})}, r"^metadata\['a'\]\[1\] has the key 2.5"),
        ({"x": b"bytes"}, "not JSON serializable"),
        ({"x": np.float32(1)}, "not JSON serializable"),
        ([1, 2], "pass a dict of JSON values"),
        ("text", "pass a dict of JSON values"),
    ],
)
async def test_metadata_that_is_not_json_is_refused(
    tmp_path: Path, metadata: Any, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        await asyncckpt.save(tmp_path / "x", TREE, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


async def test_metadata_and_metrics_are_taken_at_the_call_and_come_back(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"tokens": 10**9, "nested": [1, {"a": None}], "text": "Ä\n"}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, TREE, metadata=metadata, metrics={"loss": np.float32(2)})
        metadata["nested"][1]["a"] = "changed"
        await pending
        info = await ckpt.inspect(1)
        assert info.metadata == {"tokens": 10**9, "nested": [1, {"a": None}], "text": "Ä\n"}
        assert info.metrics == {"loss": 2.0}
        with pytest.raises(UsageError, match=r"metrics\['loss'\]='low'"):
            await ckpt.save(2, TREE, metrics={"loss": "low"})  # type: ignore[dict-item]
        for metrics in ([("loss", 1.0)], "loss", 0.5, {"loss"}):
            with pytest.raises(UsageError, match=r"metrics=.*: pass a dict of numbers"):
                await ckpt.save(2, TREE, metrics=metrics)  # type: ignore[arg-type]
        assert await ckpt.steps() == [1]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("nowhere://bucket/run/x", "no filesystem for nowhere://"),
        ("s3://key:hunter2@bucket/run/x", "seems to hold credentials"),
        ("", "pass the path of a directory"),
        ("~/run", r"~ is not expanded; pass os.path.expanduser\('~/run'\)"),
        (5, "pass a path"),
        (None, "pass a path"),
        ("a\0b/run", r"^'a\\x00b/run': no path can hold '\\x00'"),
        ("a\ud800/run", r"^'a\\ud800/run': no path can hold '\\ud800'"),
    ],
)
async def test_a_location_that_is_no_path_is_refused(location: Any, reason: str) -> None:
    for call in (
        lambda: asyncckpt.save(location, TREE),
        lambda: asyncckpt.restore(location),
        lambda: asyncckpt.inspect(location),
        lambda: asyncckpt.verify(location),
    ):
        with pytest.raises(UsageError, match=reason) as caught:
            await call()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match=reason):
        asyncckpt.Checkpointer(location)


async def test_a_relative_path_in_a_removed_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    reason = "^runs/one: this path is relative, and the working directory was removed; pass an abs"
    for call in (
        lambda: asyncckpt.Checkpointer("runs/one"),
        lambda: blocking.save("runs/one", TREE),
        lambda: blocking.restore("runs/one"),
        lambda: asyncckpt.DirectoryCoordinator("runs/one", process_index=0, process_count=1),
    ):
        with pytest.raises(UsageError, match=reason):
            call()


async def test_storage_options_with_a_local_path_are_refused_and_not_shown(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="storage_options apply to object stores") as caught:
        await asyncckpt.save(tmp_path / "x", TREE, storage_options={"token": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="storage_options"):
        asyncckpt.Checkpointer(tmp_path, storage_options={"token": "hunter2"})


@pytest.mark.parametrize("options", ["token=hunter2", ["hunter2"], 7])
@pytest.mark.parametrize("location", ["s3://bucket/run", "memory://run/x", "run/x"])
async def test_storage_options_that_are_no_mapping_are_refused_and_not_shown(
    location: str, options: Any
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: asyncckpt.save(location, TREE, storage_options=options),
        lambda: asyncckpt.restore(location, storage_options=options),
        lambda: asyncckpt.inspect(location, storage_options=options),
        lambda: asyncckpt.verify(location, storage_options=options),
        lambda: asyncckpt.collect_garbage(location, storage_options=options),
    ]
    if "://" in location:
        calls += [
            lambda: asyncckpt.convert(location, f"{location}2", storage_options=options),
            lambda: asyncckpt.diff(location, f"{location}2", storage_options=options),
            lambda: asyncckpt.tune(location, storage_options=options),
        ]
    for call in calls:
        with pytest.raises(UsageError, match="pass a dict of options") as caught:
            await call()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="pass a dict of options"):
        asyncckpt.Checkpointer(location, storage_options=options)


async def test_paths_may_be_relative_and_file_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await asyncckpt.save("runs/one", TREE)
    assert (await asyncckpt.verify(f"file://{tmp_path}/runs/one")).ok
    assert (await asyncckpt.inspect(tmp_path / "runs" / "one")).location == str(
        tmp_path / "runs" / "one"
    )


async def test_a_path_up_from_a_link_is_the_one_that_the_system_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to("../other/sub")
    monkeypatch.chdir(tmp_path / "here")
    for number, up in enumerate(("link/..", "../here//link/..//", f"{tmp_path}/here/link/..")):
        location = f"{up}/{number}"
        report = await asyncckpt.save(location, TREE)
        assert report.location == str(tmp_path / "other" / str(number))
        assert Path(location, "checkpoint.json").exists()
    # Without `..`, links stay in the path. These names only look like it.
    assert absolute("link/..a/b../...") == f"{tmp_path}/here/link/..a/b../..."
    assert absolute("/../..") == "/" and absolute("/../x") == "/x"


async def test_arguments_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    made = asyncckpt.Checkpointer
    for wrong in (
        lambda: made(tmp_path, keep=3),  # type: ignore[arg-type]
        lambda: made(tmp_path, keep=asyncckpt.KeepLast),  # type: ignore[arg-type]
        lambda: made(tmp_path, save_options={"chunk_nbytes": 1}),  # type: ignore[arg-type]
        lambda: made(tmp_path, restore_options=asyncckpt.SaveOptions()),  # type: ignore[arg-type]
        lambda: made(tmp_path, coordinator="jax"),
    ):
        with pytest.raises(UsageError, match="pass"):
            wrong()
    async with made(tmp_path) as ckpt:
        with pytest.raises(UsageError, match="progress=5: pass a function"):
            await ckpt.save(1, TREE, progress=5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="options="):
            await ckpt.save(1, TREE, options=asyncckpt.RestoreOptions())  # type: ignore[arg-type]
        await ckpt.save(1, TREE)
        with pytest.raises(UsageError, match="include="):
            await ckpt.restore(include=[1])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="leaves='arrow': pass \"numpy\""):
            await ckpt.restore(leaves="arrow")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="leaves='torch' with like="):
            await ckpt.restore(like=TREE, leaves="torch")
    secret = {"secret": "zXsecretX0815"}  # meant as storage_options
    with pytest.raises(UsageError, match=r"^options= is of type dict: pass SaveOptions") as caught:
        await asyncckpt.save(tmp_path / "y", TREE, options=secret)  # type: ignore[arg-type]
    assert "0815" not in repr(vars(caught.value)) + str(caught.value)


async def test_a_tensor_or_array_becomes_a_metric_without_a_warning(tmp_path: Path) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    loss = (torch.ones(1, requires_grad=True) * 2.5).sum()
    metrics = {"torch": loss, "numpy": np.array([0.5]), "jax": jax.numpy.float32(1.5), "int": 3}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE, metrics=metrics)
        found = (await ckpt.inspect()).metrics
        assert found == {"torch": 2.5, "numpy": 0.5, "jax": 1.5, "int": 3.0}
        with pytest.raises(UsageError, match=r"metrics\['loss'\]=.*; pass numbers"):
            await ckpt.save(2, TREE, metrics={"loss": torch.ones(2)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"metadata": {"name": "\ud800"}},
        {"metadata": {"\udcff": 1}},
        {"metadata": {"deep": [{"x": ["a", "\ud800"]}]}},
        {"metrics": {"\ud800": 1.0}},
    ],
)
async def test_a_lone_surrogate_in_metadata_is_an_error_at_the_call(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        with pytest.raises(UsageError, match="surrogates not allowed"):
            await ckpt.start_save(1, TREE, **arguments)
        assert script.kinds == []


async def test_metadata_nested_too_deeply_is_an_error_at_the_call(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {}
    for _ in range(255):
        metadata = {"in": metadata}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE, metadata=metadata)
        assert (await ckpt.inspect(1)).metadata == metadata
        script = Script(ckpt)
        with pytest.raises(UsageError, match="metadata is nested deeper than 256"):
            await ckpt.start_save(2, TREE, metadata={"in": metadata})
        assert script.kinds == []


@pytest.mark.parametrize("odd", [5, 1.5, True, object(), {1: 2}, [[]], lambda: 1])
async def test_odd_values_are_usage_errors(tmp_path: Path, odd: Any) -> None:
    place = tmp_path / "x"
    await asyncckpt.save(place, TREE)
    for call in (
        lambda: asyncckpt.restore(place, include=odd),
        lambda: asyncckpt.restore(place, leaves=odd),
        lambda: asyncckpt.restore_into(place, TREE, include=odd),
        lambda: asyncckpt.convert(place, odd),
        lambda: asyncckpt.export(place, odd),
        lambda: asyncckpt.tune("memory://x", host_memory_nbytes=odd, max_nbytes=1),
    ):
        with pytest.raises(UsageError):
            await call()


async def test_a_job_of_several_processes_without_a_runtime_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=8.*init_process_group"):
        await asyncckpt.save(tmp_path / "x", TREE)
    with pytest.raises(UsageError, match=r"WORLD_SIZE=8.*init_process_group"):
        await asyncckpt.restore(tmp_path / "x")
    await asyncckpt.save(tmp_path / "x", TREE, coordinator="single")


async def test_wrong_arguments_touch_neither_engine_nor_store(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = Script(ckpt)
    with pytest.raises(UsageError):
        await ckpt.save(-1, TREE)
    with pytest.raises(UsageError):
        await ckpt.save(1, {"x": object()})
    assert script.kinds == []
    assert not ckpt._session.runtime.engine.usable
    await ckpt.close()


@pytest.mark.parametrize("odd", ["never", 1, 0, None, np.True_])
async def test_a_switch_is_true_or_false(tmp_path: Path, odd: Any) -> None:
    place = tmp_path / "x"
    await asyncckpt.save(place, TREE)
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(1, TREE)
        for name, call in (
            ("overwrite", lambda: asyncckpt.save(place, {"other": 1}, overwrite=odd)),
            ("overwrite", lambda: ckpt.save(1, {"other": 1}, overwrite=odd)),
            ("overwrite", lambda: ckpt.start_save(1, {"other": 1}, overwrite=odd)),
            ("overwrite", lambda: asyncckpt.convert(tmp_path / "run", place, overwrite=odd)),
            ("overwrite", lambda: asyncckpt.export(tmp_path / "run", place, overwrite=odd)),
            ("strict", lambda: asyncckpt.restore(place, strict=odd)),
            ("strict", lambda: ckpt.restore_into(TREE, strict=odd)),
            ("cast", lambda: ckpt.restore(cast=odd)),
            ("cast", lambda: asyncckpt.restore_into(place, TREE, cast=odd)),
            ("bitwise", lambda: asyncckpt.diff(place, place, bitwise=odd)),
            ("dry_run", lambda: asyncckpt.collect_garbage(tmp_path, dry_run=odd)),
            ("timeline", lambda: asyncckpt.inspect(place, timeline=odd)),
            ("timeline", lambda: ckpt.inspect(timeline=odd)),
        ):
            with pytest.raises(UsageError, match=f"^{name}=.*: pass True or False$"):
                await call()
    for name in ("takeover", "preemption"):
        with pytest.raises(UsageError, match=f"^{name}=.*: pass True or False$"):
            asyncckpt.Checkpointer(tmp_path, **{name: odd})
    assert list(await asyncckpt.restore(place)) == ["w"]
    assert (await asyncckpt.verify(tmp_path / "run" / "1")).leaf_count == 1


class Waits:
    async def __call__(self, *_: object) -> None: ...

    async def keep(self, steps: object, metrics: object) -> set[int]:
        return set()


@pytest.mark.parametrize(
    "function", [Waits().__call__, Waits(), functools.partial(Waits().__call__, 1)]
)
async def test_a_coroutine_function_as_a_callback_is_refused(tmp_path: Path, function: Any) -> None:
    place = tmp_path / "x"
    await asyncckpt.save(place, TREE)
    for name, call in (
        ("progress", lambda: asyncckpt.save(tmp_path / "y", TREE, progress=function)),
        ("progress", lambda: asyncckpt.restore(place, progress=function)),
        ("progress", lambda: asyncckpt.verify(place, progress=function)),
        ("on_report", lambda: asyncckpt.restore(place, on_report=function)),
    ):
        with pytest.raises(UsageError, match=f"^{name}=.*: nothing awaits it; pass an ordinary fu"):
            await call()
    with pytest.raises(UsageError, match=r"^leaf_options=.*: nothing awaits it; pass an ordinary"):
        asyncckpt.SaveOptions(leaf_options=function)
    with pytest.raises(UsageError, match=r"^keep=.*: pass .* an ordinary method keep"):
        asyncckpt.Checkpointer(tmp_path, keep=Waits())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("other", [asyncckpt.KeepEvery, Waits(), 3])
def test_only_policies_can_be_joined(other: Any) -> None:
    for join in (
        lambda: asyncckpt.KeepLast(1) | other,
        lambda: other | asyncckpt.KeepLast(1),
    ):
        with pytest.raises(TypeError, match="unsupported operand"):
            join()


@pytest.mark.parametrize(
    ("membership", "limited"),
    [
        ("0::/\n", "memory.max"),
        ("0::/system.slice/job_7/step_0\n", "system.slice/job_7/step_0/memory.max"),
        ("0::/system.slice/job_7/step_0\n", "system.slice/job_7/memory.max"),
        ("2:cpu:/a\n4:memory:/slurm/job_7\n0::/\n", "memory/slurm/job_7/memory.limit_in_bytes"),
        ("4:memory:/docker/0a1b\n", "memory/memory.limit_in_bytes"),
        ("0::/../outside\n", "memory.max"),
        ("", "memory.max"),
        ("", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_default_budget_is_a_quarter_of_the_least_limit_of_all_cgroups_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, limited: str
) -> None:
    assert options.default_budget_nbytes() <= 8 * GIB
    (tmp_path / "memberships").write_text(membership)
    limits = [(c, top.replace("/sys/fs", str(tmp_path)), f) for c, top, f in options.CGROUP_LIMITS]
    monkeypatch.setattr(options, "CGROUP", str(tmp_path / "memberships"))
    monkeypatch.setattr(options, "CGROUP_LIMITS", limits)
    file = tmp_path / "cgroup" / limited
    file.parent.mkdir(parents=True)
    (file.parent.parent / file.name).write_text("max\n")
    file.write_text(f"{GIB}\n")
    assert options.default_budget_nbytes() == 256 * MIB


@pytest.mark.parametrize("odd", [3, 64 * MIB - 1, 1e9, True])
async def test_the_budget_of_a_measurement_has_the_limits_of_a_save(odd: Any) -> None:
    with pytest.raises(UsageError, match=r"^host_memory_nbytes=.*: pass an int from 67108864 to"):
        await asyncckpt.tune("memory://x", host_memory_nbytes=odd)
