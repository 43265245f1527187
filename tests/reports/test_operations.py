"""Timelines of saves and restores, and the part that a checkpoint keeps."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import (
    Checkpointer,
    CheckpointExistsError,
    DirectoryCoordinator,
    KeepLast,
    RestoreOptions,
    SaveAbortedError,
    SaveOptions,
    SaveReport,
    Span,
    StagingError,
    Timeline,
    blocking,
)
from asyncckpt.flow.recorder import Recorder
from asyncckpt.format.stored_timeline import MAX_TIMELINE_NBYTES
from asyncckpt.reports.timeline import Stage
from asyncckpt.save import index
from asyncckpt.save.stage import Staging
from tests.cli.ran import Ran

TREE: dict[str, Any] = {"w": np.arange(500_000.0), "b": np.arange(9.0), "step": 1}
NBYTES = 500_000 * 8

STAGES = ["snapshot", "wait", "plan", "stage", "serialize", "upload", "index", "publish"]
"""Besides `open`, which runs beside the first copies and may begin before or after them."""


def names(timeline: Timeline) -> list[str]:
    """Return the stages of a save by begin, without `open`."""
    stages = [*timeline.stages()]
    stages.remove("open")
    return stages


def checked(timeline: Timeline, total_s: float) -> dict[str, Stage]:
    """Return the stages of a timeline, which begins and ends with its operation."""
    spans = timeline.spans
    assert [*spans] == sorted(spans, key=lambda span: span.start_s)
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    assert timeline.end_s <= total_s + 0.05
    return dict(timeline.stages())


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("place", ["local", "memory"])
async def test_a_save_has_all_its_stages_and_their_bytes(
    tmp_path: Path, place: str, compression: Any
) -> None:
    root = f"memory://timelines-{compression}" if place == "memory" else str(tmp_path)
    options = SaveOptions(compression=compression)
    async with Checkpointer(root, keep=KeepLast(1), save_options=options) as ckpt:
        await ckpt.save(1, TREE)
        report = await ckpt.save(2, TREE)
    stages = checked(report.timeline, report.total_s + 1)  # retention comes after
    assert names(report.timeline) == [*STAGES, "retain"]
    assert stages["snapshot"].start_s == 0.0
    assert stages["stage"].nbytes >= NBYTES
    if compression is None:
        assert NBYTES <= stages["upload"].nbytes <= NBYTES * 1.02
    else:
        assert stages["serialize"].nbytes >= NBYTES  # else copies are checksummed as made
        assert 0 < stages["upload"].nbytes < NBYTES
    assert stages["stage"].start_s <= stages["upload"].end_s <= stages["publish"].start_s
    assert report.stage_s == {name: stage.busy_s for name, stage in stages.items()}
    assert "Timeline" not in repr(report)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("place", ["local", "memory"])
async def test_a_restore_has_all_its_stages_and_their_bytes(
    tmp_path: Path, place: str, compression: Any
) -> None:
    where = f"memory://restored-{compression}/c" if place == "memory" else str(tmp_path / "c")
    await asyncckpt.save(where, TREE, options=SaveOptions(compression=compression))
    report = await asyncckpt.restore_into(
        where, TREE, options=RestoreOptions(host_memory_nbytes=64 << 20)
    )
    stages = checked(report.timeline, report.total_s)
    # What is checked in the call that reads it need not be decoded: all, a part, or nothing.
    assert [s for s in stages if s != "decode"] == ["open", "match", "plan", "fetch", "place"]
    nbytes = stages["fetch"].nbytes
    assert nbytes >= NBYTES if compression is None else 0 < nbytes < NBYTES


async def test_reports_write_traces_and_pictures(tmp_path: Path) -> None:
    report = await asyncckpt.save(tmp_path / "c", TREE)
    report.write_trace(tmp_path / "save.json")
    assert json.loads((tmp_path / "save.json").read_text())["otherData"]["title"] == str(report)
    report.plot(tmp_path / "save.svg")
    assert "the state may change" in (tmp_path / "save.svg").read_text()
    restored = await asyncckpt.restore_into(tmp_path / "c", TREE)
    restored.plot(tmp_path / "restore.png")
    assert (tmp_path / "restore.png").read_bytes().startswith(b"\x89PNG")


async def test_dollars_in_a_location_are_drawn_as_they_are(tmp_path: Path) -> None:
    report = await asyncckpt.save(tmp_path / "$lr_{$", TREE)  # no formula of matplotlib
    report.plot(tmp_path / "save.svg")
    assert "$lr_{$" in (tmp_path / "save.svg").read_text()
    long, short = (Span(f"${name}_{{$", 0, 0, 0.0, end, 0) for name, end in (("a", 1), ("b", 1e-3)))
    replace(report, timeline=Timeline((long, short))).plot(tmp_path / "save.svg")


def test_the_blocking_facade_has_the_same_timelines(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        report = ckpt.start_save(1, TREE).result()
        assert names(report.timeline) == STAGES
        assert names(ckpt.inspect(1, timeline=True).timeline) == STAGES[:-2]
        assert not ckpt.inspect(1).timeline.spans


async def test_a_skipped_save_has_an_empty_timeline(tmp_path: Path) -> None:
    report = SaveReport(str(tmp_path), 1, "", 0, 0, 0, 0, 0, 0.0, 0.0, skipped=True)
    assert report.timeline == Timeline() and report.stage_s == {}


# ------------------------------------------------------------------------- saves that do not end


def recorders() -> int:
    gc.collect()
    return sum(isinstance(found, Recorder) for found in gc.get_objects())


async def test_a_failed_save_leaves_no_recorder_behind(tmp_path: Path) -> None:
    async with Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        before = recorders()
        with pytest.raises(CheckpointExistsError):
            await ckpt.save(1, TREE)
        await ckpt.save(2, TREE)  # until then the failure may be asked for
        assert recorders() == before


async def test_a_cancelled_save_leaves_no_recorder_behind(tmp_path: Path) -> None:
    async with Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        before = recorders()
        pending = await ckpt.start_save(2, TREE)
        if pending.cancel():
            with pytest.raises(SaveAbortedError):
                await pending
        del pending
        await ckpt.save(3, TREE)
        assert recorders() == before


async def test_a_stage_that_fails_ends_the_save_and_its_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StagingError("no copy", path="w")

    async with Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        before = recorders()
        with monkeypatch.context() as patch, pytest.raises(StagingError, match="no copy"):
            patch.setattr(Staging, "_fill", fail)
            await ckpt.save(2, TREE)
        await ckpt.save(2, TREE)
        assert recorders() == before


# --------------------------------------------------------------------------- in the checkpoint


async def test_a_checkpoint_keeps_the_timeline_of_its_save(tmp_path: Path) -> None:
    report = await asyncckpt.save(tmp_path / "c", TREE)
    info = await asyncckpt.inspect(tmp_path / "c", timeline=True)
    assert names(info.timeline) == STAGES[:-2]  # those until the index was made
    for stage, whole in info.timeline.stages().items():
        known = report.timeline.stages()[stage]
        assert whole.nbytes <= known.nbytes
        assert whole.end_s <= known.end_s + 1e-6  # it may have gone on
        assert whole.start_s == pytest.approx(known.start_s, abs=1e-6)
    info.plot(tmp_path / "kept.png")
    assert (await asyncckpt.verify(tmp_path / "c")).ok


async def test_the_record_knows_nothing_of_it(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "c", TREE)
    record = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    assert "timeline" not in json.dumps(record)
    index = record["chunk_index"]
    file = (tmp_path / "c" / record["files"][index["file"]]["path"]).read_bytes()
    kept = file[: index["offset"]]
    assert kept.endswith(b"ACKT")
    nbytes = int.from_bytes(kept[-12:-8], "little")
    assert nbytes + 12 <= MAX_TIMELINE_NBYTES
    assert json.loads(kept[-12 - nbytes : -12])["process"] == 0


async def test_a_missing_or_damaged_timeline_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "encode_timeline", lambda _: b"")
    await asyncckpt.save(tmp_path / "none", TREE)
    assert (await asyncckpt.inspect(tmp_path / "none", timeline=True)).timeline == Timeline()
    monkeypatch.setattr(index, "encode_timeline", lambda _: b"\xff" * 90 + b"ACKT")
    await asyncckpt.save(tmp_path / "bad", TREE)
    info = await asyncckpt.inspect(tmp_path / "bad", timeline=True)
    assert info.timeline == Timeline()
    restored = await asyncckpt.restore(tmp_path / "bad")
    np.testing.assert_array_equal(restored["w"], TREE["w"])


# ----------------------------------------------------------------------------- several processes


def test_process_0_knows_the_stages_of_all(tmp_path: Path) -> None:
    reports: dict[int, Any] = {}

    async def main(process: int) -> None:
        coordinator = DirectoryCoordinator(
            tmp_path / "keys", process_index=process, process_count=2
        )
        async with Checkpointer(tmp_path / "root", coordinator=coordinator) as ckpt:
            saved = await ckpt.save(1, TREE)
            restored = await ckpt.restore_into(dict(TREE))
            reports[process] = saved, restored
        await coordinator.close()

    threads = [threading.Thread(target=asyncio.run, args=(main(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert reports.keys() == {0, 1}
    for kind in range(2):
        own, other = reports[0][kind].timeline, reports[1][kind].timeline
        assert (own.process, other.process) == (0, 1)
        assert own.processes() == [0, 1] and other.processes() == [1]
        for stage, whole in own.stages(1).items():
            known = other.stages()[stage]
            assert whole.start_s == pytest.approx(known.start_s, abs=1e-6)
            assert whole.nbytes == known.nbytes
        assert {"stage", "fetch"} & own.stages(1).keys()
    assert [*reports[1][0].stage_s] == [*other_stages(reports[1][0])]
    info = blocking.inspect(tmp_path / "root" / "1", timeline=True)
    assert info.timeline.processes() == [0, 1]


def other_stages(report: SaveReport) -> list[str]:
    return list(dict.fromkeys(span.stage for span in report.timeline.spans))


# ------------------------------------------------------------------------------ the command line


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    from asyncckpt.cli import main

    status = main([str(argument) for argument in arguments])
    return Ran(status, *capsys.readouterr())


def test_show_prints_the_timeline_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        ckpt.save(7, TREE)
    for path in (tmp_path, tmp_path / "7"):
        done = shown(capsys, "show", path, "--timeline")
        assert done.status == 0
        lines = {line.split()[0]: line for line in done.out.splitlines() if line}
        assert {"checkpoint", "open", *STAGES[:-2]} <= lines.keys()
        assert "MiB/s" in lines["upload"] or "GiB/s" in lines["upload"]
        assert "█" in done.out or "▓" in done.out or "▒" in done.out
    document = json.loads(shown(capsys, "show", tmp_path, "--timeline", "--json").out)
    assert document["timeline"]["process"] == 0
    assert document["timeline"]["spans"][0]["stage"] == "snapshot"
    assert "timeline" not in json.loads(shown(capsys, "show", tmp_path, "--json").out)


def test_show_says_where_there_is_no_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones(3)}, tmp_path / "a.safetensors")
    done = shown(capsys, "show", tmp_path / "a.safetensors", "--timeline")
    assert done.status == 0 and "has no timeline" in done.out
