"""The examples of README and documentation run, and what the pages list is what there is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fractions
import itertools
import re
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

import asyncckpt
from asyncckpt import blocking, cli, errors
from asyncckpt.stores.local.failures import store_error
from asyncckpt.stores.objects.clients.client import Kind, RequestError
from asyncckpt.stores.objects.failures import store_error as request_failed
from tests.simulator import Simulator, simulator

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """The bucket called bucket is where clients find it that are told nothing."""
    with simulator() as sim:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL", sim.s3_endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", sim.region)
        monkeypatch.setitem(fsspec.config.conf, "gs", sim.gcs_options())
        monkeypatch.setitem(fsspec.config.conf, "gcs", sim.gcs_options())
        yield sim


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.name)
def test_the_examples_of_a_page_run_in_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: Simulator
) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    names: dict[str, Any] = {"__name__": path.stem}
    for found in BLOCK.finditer(text):
        # Errors then name the page and the line in it.
        lines = "\n" * text.count("\n", 0, found.start(1))
        exec(compile(lines + found[1], str(path), "exec"), names)
    if path.stem == "coming-from":
        (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for command in re.findall(r"^asyncckpt ([^#\n]+)", block, re.MULTILINE):
            assert cli.main(command.split()) == 0, command
    left = [file for file in tmp_path.rglob("*") if ".asyncckpt" in file.parts]
    if path.stem == "takeover":
        of_claims = re.compile(r"\.asyncckpt|claim-[12]|epoch-2")  # which a run keeps
        left = [file for file in left if not of_claims.fullmatch(file.name)]
    assert left == []


def test_the_layers_on_two_pages_are_those_that_are_checked() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    (line,) = re.findall(r"^`(testing > [^`]+)`$", page("design.md"), re.M)
    assert " ".join(line.split()).split(" > ") == layers
    (diagram,) = re.findall(r"```text\n(testing\n.*?)```", CONTRIBUTING.read_text(), re.S)
    names = [re.split(r"  +", row)[0] for row in diagram.splitlines()]
    assert [name for name in names if name] == layers


def test_readme_is_short_and_has_what_it_must() -> None:
    text = PAGES[0].read_text()
    assert text.count("\n") <= 150
    assert "make demo" in text and "make test" in text and "durable save" in text
    assert "make bench" in text and "## Limitations" in text


def test_links_between_pages_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            found = (path.parent / target).resolve()
            # The site has nothing but docs/.
            inside = path.parent == REPOSITORY or found.is_relative_to(REPOSITORY / "docs")
            assert found.exists() and inside, f"{path.name} links to {target}"


def test_no_code_in_a_table_has_a_bar() -> None:
    """GitHub ends the cell there, and shows `\\|` as a bar; the site does neither."""
    for path in [*PAGES, CONTRIBUTING]:
        for row in re.findall(r"^\|.*$", path.read_text(), re.MULTILINE):
            for code in re.findall(r"`([^`]*)`", row):
                assert "|" not in code, f"{path.name}: write <code>…&#124;…</code> for {code}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^  - .+: ([\w-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in PAGES[1:])


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_on_the_api_page() -> None:
    text = page("api.md")
    missing = [name for name in asyncckpt.__all__ if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_every_method_of_the_checkpointer_is_on_the_api_page() -> None:
    text = page("api.md")
    for kind in (asyncckpt.Checkpointer, asyncckpt.PendingSave, blocking.PendingSave):
        public = [name for name in vars(kind) if not name.startswith("_")]
        assert [name for name in public if f"{name}" not in text] == []


def test_the_error_tree_is_on_the_api_page() -> None:
    text = page("api.md")
    for name, kind in vars(errors).items():
        if name.startswith("_"):
            continue
        if isinstance(kind, type) and issubclass(kind, errors.AsyncCheckpointError):
            assert re.search(rf"^[│ ├└─]*{name}\b", text, re.M), name


@pytest.mark.parametrize(
    "options",
    [asyncckpt.SaveOptions, asyncckpt.LeafOptions, asyncckpt.RestoreOptions],
    ids=lambda options: options.__name__,
)
def test_the_options_table_states_the_defaults(options: Any) -> None:
    section = page("options.md").split(f"## {options.__name__}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    listed = [(name, default) for name, default, _ in rows]
    assert listed == [(f.name, repr(f.default)) for f in dataclasses.fields(options)]
    assert all(len(reason) > 20 for _, _, reason in rows)


# -------------------------------------------------------------------------------------- errors


def exists(where: Path) -> None:
    blocking.save(where / "taken", {"x": 1})
    blocking.save(where / "taken", {"x": 1})


def damaged(where: Path) -> None:
    blocking.save(where / "damaged", {"x": np.zeros(1000)})
    (file,) = (where / "damaged" / "default" / "d").glob("*-0")
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    blocking.restore(where / "damaged")


def unlike(saved: Any, like: Any, **options: Any) -> Callable[[Path], None]:
    def run(where: Path) -> None:
        blocking.save(where / "saved", {"x": saved})
        blocking.restore(where / "saved", like=like, **options)

    return run


def closed(where: Path) -> None:
    run = blocking.Checkpointer(where)
    run.close()
    run.steps()


def cancelled(where: Path) -> None:
    async def run() -> None:
        async with asyncckpt.Checkpointer(where) as ckpt:
            pending = await ckpt.start_save(0, {"x": np.zeros(1 << 22)})
            pending.cancel()
            with contextlib.suppress(asyncckpt.UsageError):
                await pending

    asyncio.run(run())


def late(where: Path) -> None:
    options = asyncckpt.SaveOptions(deadline_s=1e-9)
    blocking.save(where / "late", {"x": np.zeros(1 << 20)}, options=options)


def donated(where: Path) -> None:
    array = jnp.zeros(3)
    array.delete()
    blocking.save(where / "donated", {"x": array})


def system(number: int, text: str) -> Callable[[Path], None]:
    def run(where: Path) -> None:
        raise store_error("writing", str(where), OSError(number, text))

    return run


def gaps(where: Path) -> None:
    half = asyncckpt.ShardedArray((4,), "float32", [((0,), np.zeros(2, np.float32))])
    blocking.save(where / "gaps", {"x": half})


def on_no_grid() -> asyncckpt.ShardedArray:
    edges = [0, 67, 147, 200]
    shards = [((a, 0), np.zeros((b - a, 200), np.float32)) for a, b in itertools.pairwise(edges)]
    return asyncckpt.ShardedArray((200, 200), "float32", shards)


def irregular(where: Path) -> None:
    options = asyncckpt.SaveOptions(layout="regular")
    blocking.save(where / "irregular", {"x": on_no_grid()}, options=options)


def root_of_a_run(where: Path) -> None:
    with blocking.Checkpointer(where / "run") as ckpt:
        ckpt.save(3, {"x": 1})
    blocking.restore(where / "run")


def root_that_is_a_checkpoint(where: Path) -> None:
    blocking.save(where / "saved", {"x": 1})
    blocking.Checkpointer(where / "saved").latest_step()


ROWS = np.zeros((3, 4))


def into(where: Path, a: Any, b: Any) -> None:
    blocking.save(where / "saved", {"a": np.zeros(a.shape), "b": np.ones(b.shape)})
    blocking.restore_into(where / "saved", {"a": a, "b": b})


def other_files(where: Path) -> None:
    (where / "README").write_text("no checkpoint")
    blocking.restore(where)


def torch_file(where: Path) -> None:
    torch.save({"x": torch.zeros(3)}, where / "x.pt")
    blocking.restore(where / "x.pt")


def dcp_with_an_object(where: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save({"x": fractions.Fraction(1, 2)}, checkpoint_id=where / "dcp", no_dist=True)
    blocking.restore(where / "dcp")


def database(where: Path, **metadata: Any) -> Any:
    """A zarr array in an OCDBT database of TensorStore."""
    kvstore = {"driver": "ocdbt", "base": f"file://{where}/database", "path": "x/"}
    field = {"field": "a"} if "a" in str(metadata["dtype"]) else {}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": None, **metadata}}
    return tensorstore.open({**spec, **field}, create=True).result()


def zarr_of_records(where: Path) -> None:
    database(where, shape=[2], chunks=[2], dtype=[["a", "<f4"], ["b", "<i4"]])
    blocking.restore(where / "database")


def unstored(where: Path) -> None:
    array = database(where, shape=[1 << 30], chunks=[1 << 16], dtype="<f4")
    array[0].write(np.float32(1)).result()
    blocking.restore(where / "database")


def two_files(where: Path) -> None:
    for name in ("a", "b"):
        save_file({name: np.zeros(3)}, where / f"{name}.safetensors")
    blocking.restore(where)


def converted(tree: Any, name: str) -> Callable[[Path], None]:
    def run(where: Path) -> None:
        blocking.save(where / "saved", tree)
        blocking.convert(where / "saved", where / name)

    return run


def exported(where: Path) -> None:
    blocking.save(where / "saved", {"x": 1 << 80})
    blocking.export(where / "saved", where / "exported")


def requested(kind: Kind) -> Callable[[Path], None]:
    def run(where: Path) -> None:
        raise request_failed("reading", "s3://bucket/run", RequestError(kind, "detail"))

    return run


def in_the_way(where: Path) -> None:
    blocking.save("memory://in/the/way.safetensors/x", {"x": 1})
    blocking.save(where / "saved", {"x": FLOATS})
    blocking.convert(where / "saved", "memory://in/the/way.safetensors", overwrite=True)


FLOATS = np.zeros(3)


def unlaunched(where: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WORLD_SIZE", "2")
        blocking.save(where / "x", {"x": 1})


@contextlib.contextmanager
def coordinator(where: Path, process: int) -> Iterator[asyncckpt.DirectoryCoordinator]:
    made = asyncckpt.DirectoryCoordinator(where / "keys", process_index=process, process_count=2)
    try:
        yield made
    finally:
        asyncio.run(made.close())


def one_alone(where: Path) -> None:
    options = asyncckpt.SaveOptions(arrival_s=0.3)
    with coordinator(where, 0) as given:
        blocking.save(where / "x", {"x": 1}, options=options, coordinator=given)


def together(where: Path, part: Callable[[blocking.Checkpointer, int], Any]) -> None:
    """Play two processes in threads; raises what process 0 does."""

    def play(process: int) -> None:
        with (
            coordinator(where, process) as given,
            blocking.Checkpointer(
                where / "run",
                save_options=asyncckpt.SaveOptions(arrival_s=1.0),
                coordinator=given,
            ) as ckpt,
        ):
            part(ckpt, process)

    with ThreadPoolExecutor(2) as threads:
        plays = [threads.submit(play, process) for process in range(2)]
    plays[0].result()


def once_more_on_one(ckpt: blocking.Checkpointer, process: int) -> None:
    for step in range(2 - process):
        ckpt.save(step, {"x": 1})


def fewer_calls(where: Path) -> None:
    ended = threading.Event()

    def part(ckpt: blocking.Checkpointer, process: int) -> None:
        ckpt.save(0, {"x": 1})
        if process:
            ended.wait(30)
            return
        try:
            ckpt.save(1, {"x": 1})
        finally:
            ended.set()

    together(where, part)


def unmeshed(ckpt: blocking.Checkpointer, process: int) -> None:
    ckpt.save(1, {"x": np.zeros(3 + process)})


def unwanted(ckpt: blocking.Checkpointer, process: int) -> None:
    ckpt.save(1, {"x": 1, "y": 2})
    ckpt.restore(like={"x": 0})


def wrapped(where: Path) -> None:
    inside = torch.nn.Linear(2, 2)
    outside = torch.nn.Module()
    outside.module = inside
    blocking.save(where / "x", {"model": inside})
    blocking.restore_into(where / "x", {"model": outside})


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "existing": ("a checkpoint already exists here; pass overwrite=True to replace it", exists),
    "leaf": (
        "cannot be stored",
        lambda where: blocking.save(where / "x", {"x": {1, 2}}),
    ),
    "torch dtype": (
        "a leaf of type torch.dtype cannot be stored",
        lambda where: blocking.save(where / "x", {"x": torch.bfloat16}),
    ),
    "key": (
        "keys are str or int: convert it, for example with str(key)",
        lambda where: blocking.save(where / "x", {1.5: 1}),
    ),
    "donated": ("this array was deleted or donated", donated),
    "step": (
        "a step is a non-negative integer",
        lambda where: blocking.Checkpointer(where).save(-1, {}),
    ),
    "full": ("No space left on device (ENOSPC)", system(errno.ENOSPC, "No space left on device")),
    "permission": (
        "permission denied: check the owner and mode of the directory",
        system(errno.EACCES, "Permission denied"),
    ),
    "read-only": (
        "the file system is mounted read-only",
        system(errno.EROFS, "Read-only file system"),
    ),
    "deadline": ("the save did not finish within", late),
    "cancelled": ("the save was cancelled in", cancelled),
    "shared options": (
        "all saves of a Checkpointer share this",
        lambda where: blocking.Checkpointer(where).save(
            1, {"x": 1}, options=asyncckpt.SaveOptions(exit_deadline_s=5.0)
        ),
    ),
    "no step": (
        "there is no checkpoint to restore",
        lambda where: blocking.Checkpointer(where).restore(),
    ),
    "other step": ("there is no such step", lambda where: blocking.Checkpointer(where).restore(5)),
    "no root": ("this is a checkpoint, not the root of a run", root_that_is_a_checkpoint),
    "overlap": (
        "these targets overlap in memory but are different arrays in the checkpoint",
        lambda where: into(where, ROWS[:2], ROWS[1:]),
    ),
    "wrapper": ("The keys differ only by the name of a wrapper", wrapped),
    "twins": (
        "the checkpoint holds different values for what is one array in the target",
        lambda where: into(where, ROWS[:2], ROWS[:2]),
    ),
    "nothing": (
        "no such file; there is no checkpoint here",
        lambda where: blocking.restore(where / "gone"),
    ),
    "launched": (
        "but neither torch.distributed nor jax.distributed has been initialised",
        unlaunched,
    ),
    "alone": ("All processes must make this call", one_alone),
    "fewer calls": ("processes made this call", fewer_calls),
    "left": (
        "closed the Checkpointer that is still in use here",
        lambda where: together(where, once_more_on_one),
    ),
    "other calls": (
        "all processes make the same calls in the same order",
        lambda where: together(
            where, lambda ckpt, process: ckpt.delete(1) if process else ckpt.latest_step()
        ),
    ),
    "replicas": (
        "hold different values of this leaf",
        lambda where: together(where, lambda ckpt, process: ckpt.save(1, {"x": process})),
    ),
    "divided per process": (
        "a sharded array cannot be below a PerProcess",
        lambda where: together(
            where,
            lambda ckpt, process: ckpt.save(
                1,
                {
                    "x": asyncckpt.PerProcess(
                        asyncckpt.ShardedArray((2,), "float64", [((process,), np.ones(1))])
                    )
                },
            ),
        ),
    ),
    "parts": (
        "leaves of one path are parts or copies of one value",
        lambda where: together(where, unmeshed),
    ),
    "unwanted": ("the target of no process does", lambda where: together(where, unwanted)),
    "several": (
        "leaves do not fit the target; nothing was read",
        unlike(FLOATS, {"x": np.zeros(4), "y": 1}),
    ),
    "shape": ("the checkpoint holds shape", unlike(FLOATS, {"x": np.zeros(4)})),
    "dtype": ("cast=True converts", unlike(FLOATS, {"x": np.zeros(3, "f4")})),
    "x64": (
        "cannot be restored into JAX with 64-bit types disabled",
        lambda where: (
            blocking.save(where / "x64", {"x": FLOATS}),
            blocking.restore(where / "x64", leaves="jax"),
        ),
    ),
    "range": (
        "of the checkpoint does not fit into",
        unlike(np.array([1e9]), {"x": np.zeros(1, np.int8)}, cast=True),
    ),
    "damaged": ("is damaged", damaged),
    "gaps": ("to be saved, every element must be in a shard", gaps),
    "irregular": ("allows 4 per shard and 2 % of padding", irregular),
    "root": ("this is the root of a run, not a checkpoint", root_of_a_run),
    "other files": (
        "there is no checkpoint here: no checkpoint.json, and nothing that Orbax",
        other_files,
    ),
    "torch.save": ("this is a file of torch.save", torch_file),
    "pickle": ("nothing is executed from a checkpoint", dcp_with_an_object),
    "zarr": ("which is not read here", zarr_of_records),
    "fill values": ("implied fill values", unstored),
    "two files": ("one safetensors file or one index is read", two_files),
    "names": (
        "would both be the tensor",
        converted({"a": {"b": FLOATS}, "a.b": FLOATS}, "x.safetensors"),
    ),
    "no dtype": ("safetensors has no dtype", converted(FLOATS * 1j, "x.safetensors")),
    "export": ("Orbax cannot restore this tree, so it was not exported", exported),
    "taken": ("something already exists here", converted({"x": FLOATS}, "saved")),
    "closed": ("is closed; create a new Checkpointer", closed),
    "no bucket": ("there is no such bucket", requested("no_bucket")),
    "credentials": (
        "the store does not accept the credentials, or there are none",
        requested("credentials"),
    ),
    "forbidden": ("these credentials may not do that", requested("forbidden")),
    "endpoint": ("the bucket is not at this endpoint or in this region", requested("endpoint")),
    "throttled": (
        "the store asked for fewer requests until the last try",
        requested("throttled"),
    ),
    "timeout": ("the store did not answer in time", requested("timeout")),
    "connection": ("no connection could be kept", requested("connection")),
    "quota": ("the account or the bucket is full, or its billing is off", requested("quota")),
    "missing package": (
        "is not installed",
        lambda where: blocking.restore("gdrive://folder/run"),
    ),
    "credentials in a URL": (
        "seems to hold credentials",
        lambda where: blocking.restore("s3://key:secret@bucket/run"),
    ),
    "in the way": ("a directory exists here", in_the_way),
    "local options": (
        "storage_options apply to object stores",
        lambda where: blocking.restore(where, storage_options={"anon": True}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_troubleshooting_page_quotes_errors_as_they_are(case: str, tmp_path: Path) -> None:
    quoted, provoke = CASES[case]
    with jax.enable_x64(False), pytest.raises(asyncckpt.AsyncCheckpointError) as caught:
        provoke(tmp_path)
    assert quoted in str(caught.value)
    text = page("troubleshooting.md")
    found = [line for line in text.splitlines() if line.startswith("- **") and quoted in line]
    if case != "leaf":
        assert len(found) == 1, quoted
        assert f"`{type(caught.value).__name__}`" in found[0]


def test_the_troubleshooting_page_quotes_warnings_and_notes_as_they_are(tmp_path: Path) -> None:
    zstd = {"id": "zstd", "level": 1}
    chunk = [20 << 20]
    database(tmp_path, shape=chunk, chunks=chunk, dtype="<f4", compressor=zstd).write(1).result()
    options = asyncckpt.RestoreOptions(host_memory_nbytes=64 << 20)
    with pytest.warns(asyncckpt.RestoreWarning) as caught:
        blocking.restore(tmp_path / "database", options=options)
    (note,) = blocking.save(tmp_path / "pieces", {"x": on_no_grid()}).notes
    text = page("troubleshooting.md")
    for quoted, where, said in (
        ("arrays have no checksum in this", "RestoreWarning", str(caught[0].message)),
        ("was restored alone, beyond the budget", "RestoreWarning", str(caught[1].message)),
        ("this leaf is stored in pieces", "a note in `SaveReport.notes`", note),
    ):
        assert quoted in said
        (line,) = [line for line in text.splitlines() if f"**`{quoted}`**" in line]
        assert where in line
