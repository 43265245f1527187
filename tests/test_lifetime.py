"""From the first use of a `Checkpointer` to the end of its process, in order and out of order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import blocking
from asyncckpt.errors import CheckpointNotFoundError, ClosedError, EngineDiedError, UsageError
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import is_record
from asyncckpt.runtime import Runtime
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.faults import Fault, FaultStore, Gate
from tests import children
from tests.script import Script, in_thread
from tests.watch import nothing_left_behind

TREE = {"w": np.arange(50_000.0), "step": 1}

HANGING_WRITE = """
import os, sys, threading, time
import numpy as np
import asyncckpt
from asyncckpt import blocking
from asyncckpt.stores.local.datafile import LocalDataFile

begun = threading.Event()
real = LocalDataFile._write
def hang(self, offset, data):
    begun.set()
    threading.Event().wait()
"""


EARLIER: set[threading.Thread] = set()
"""Threads that tests of other files have left in this process."""


@pytest.fixture(scope="module", autouse=True)
def earlier() -> None:
    EARLIER.update(threading.enumerate())


def engine_threads() -> list[str]:
    threads = set(threading.enumerate()) - EARLIER
    return sorted(t.name for t in threads if t.name.startswith("asyncckpt"))


def test_importing_asyncckpt_imports_no_framework_and_no_backend() -> None:
    loaded = children.output(
        """
        import sys
        import asyncckpt
        before = set(sys.modules)
        from asyncckpt import blocking
        asyncckpt.Checkpointer, asyncckpt.save, asyncckpt.SaveOptions()
        print(len(before), *sorted(sys.modules))
        """
    ).split()
    heavy = {
        *("jax", "jaxlib", "torch", "tensorstore", "orbax", "gcsfs", "s3fs", "obstore", "boto3"),
        *("fsspec", "aiohttp", "typer", "rich"),
    }
    assert heavy.isdisjoint(loaded)


def test_saving_numpy_arrays_imports_no_framework(tmp_path: Path) -> None:
    children.output(
        """
        import sys
        import numpy as np
        from asyncckpt import blocking
        blocking.save(sys.argv[1], {"w": np.arange(5)})
        assert blocking.restore(sys.argv[1])["w"].tolist() == [0, 1, 2, 3, 4]
        blocking.verify(sys.argv[1])
        assert not {"jax", "torch", "tensorstore"} & set(sys.modules)
        """,
        tmp_path / "x",
    )


def test_every_public_name_is_there_and_nothing_else_is() -> None:
    assert set(asyncckpt.__all__) <= set(dir(asyncckpt))
    for name in asyncckpt.__all__:
        assert getattr(asyncckpt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        asyncckpt.nonsense  # noqa: B018


async def test_use_after_close_is_an_error(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    await ckpt.save(1, TREE)
    await ckpt.close()
    await ckpt.close()
    await ckpt.wait()
    for call in (
        lambda: ckpt.save(2, TREE),
        lambda: ckpt.start_save(2, TREE),
        lambda: ckpt.restore(),
        lambda: ckpt.restore_into(TREE),
        lambda: ckpt.prepare(TREE),
        lambda: ckpt.steps(),
        lambda: ckpt.latest_step(),
        lambda: ckpt.inspect(),
        lambda: ckpt.verify(),
        lambda: ckpt.delete(1),
        lambda: ckpt.delete_after(1),
        lambda: ckpt.__aenter__(),
    ):
        closed = f"^Checkpointer\\('{tmp_path}'\\) is closed; create a new Checkpointer"
        with pytest.raises(ClosedError, match=closed):
            await call()
    assert "closed" in repr(ckpt)


async def test_with_is_optional_and_no_thread_exists_before_the_first_use(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    assert engine_threads() == []
    await ckpt.save(1, TREE)
    assert "asyncckpt" in engine_threads()
    await ckpt.close()
    assert engine_threads() == []


async def test_a_one_shot_call_leaves_no_thread(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "x", TREE)  # what is opened once per process
    with nothing_left_behind():
        await asyncckpt.save(tmp_path / "y", TREE)
        await asyncckpt.restore(tmp_path / "y")
        await asyncckpt.verify(tmp_path / "y")
        await asyncckpt.inspect(tmp_path / "y")
        with pytest.raises(asyncckpt.CheckpointExistsError):
            await asyncckpt.save(tmp_path / "y", TREE)
        with pytest.raises(asyncckpt.CheckpointNotFoundError):
            await asyncckpt.restore(tmp_path / "z")


@pytest.mark.parametrize("call", ["save", "one-shot", "enter", "close"])
async def test_a_coroutine_that_is_closed_cancels_its_work_without_awaiting(
    tmp_path: Path, call: str
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    Script(ckpt).hold("write")
    if call == "close":
        await ckpt.start_save(1, TREE)
    coroutine = {
        "save": lambda: ckpt.save(1, TREE),
        "one-shot": lambda: asyncckpt.save(tmp_path / "x", TREE),
        "enter": ckpt.__aenter__,
        "close": ckpt.close,
    }[call]()
    coroutine.send(None)
    coroutine.close()
    if call == "save":
        await ckpt.close()
    async with asyncio.timeout(30):
        while engine_threads():
            await asyncio.sleep(0.01)
    assert await asyncckpt.Checkpointer(tmp_path).steps() == []


async def test_a_checkpointer_dropped_without_close_leaks_no_thread(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    await ckpt.save(1, TREE)
    found = set(threading.enumerate()) - EARLIER
    threads = [thread for thread in found if thread.name.startswith("asyncckpt")]
    assert threads
    del ckpt
    gc.collect()
    for thread in threads:
        await in_thread(lambda t=thread: t.join(30))
    assert engine_threads() == []


async def test_a_checkpointer_dropped_with_a_save_in_flight_finishes_it(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    publish = Script(ckpt).hold("publish")
    pending = await ckpt.start_save(1, TREE)
    await publish.reached()
    del ckpt
    gc.collect()
    assert not pending.done()
    publish.go()
    assert (await pending).step == 1
    assert (await asyncckpt.verify(tmp_path / "1")).ok


async def test_one_checkpointer_serves_two_event_loops_and_threads(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:

        async def elsewhere(first: int) -> list[int]:
            pending = [await ckpt.start_save(step, TREE) for step in range(first, first + 3)]
            for one in pending:
                await one
            found = await ckpt.restore(first)
            assert found["w"].tobytes() == TREE["w"].tobytes()
            return [report.step or 0 for report in [await one for one in pending]]

        others = [in_thread(lambda n=n: asyncio.run(elsewhere(n))) for n in (10, 20)]
        assert await elsewhere(0) == [0, 1, 2]
        assert [await other for other in others] == [[10, 11, 12], [20, 21, 22]]
        assert await ckpt.steps() == [0, 1, 2, 10, 11, 12, 20, 21, 22]


async def test_a_pending_save_may_be_awaited_from_another_loop(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, TREE)

        async def wait() -> int | None:
            return (await pending).step

        assert await in_thread(lambda: asyncio.run(wait())) == 1
        assert (await pending).step == 1


async def test_the_death_of_the_engine_fails_what_is_outstanding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    await ckpt.save(1, TREE)
    script = Script(ckpt)
    write = script.hold("write")
    pending = await ckpt.start_save(2, TREE)
    await write.reached()
    read = script.hold("read_into")
    restoring = asyncio.create_task(ckpt.restore(1))
    await read.reached()

    def die() -> None:
        raise SystemExit("on purpose")

    with caplog.at_level(logging.CRITICAL, "asyncckpt"):
        ckpt._session.runtime.engine.post(die)
        with pytest.raises(EngineDiedError, match="Create a new Checkpointer"):
            await pending
        with pytest.raises(EngineDiedError):
            await restoring
    with pytest.raises(EngineDiedError, match="its thread has ended"):
        await ckpt.save(3, TREE)
    await ckpt.close()
    async with asyncio.timeout(30):
        while engine_threads():  # they end by themselves, at leisure
            await asyncio.sleep(0.01)
    # What was committed stays, the rest was cleaned up.
    async with asyncckpt.Checkpointer(tmp_path) as again:
        assert await again.steps() == [1]
        assert (await again.verify(1)).ok
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


async def test_a_save_that_is_committed_while_the_engine_dies_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    engine = ckpt._session.runtime.engine
    real, dying = os.fsync, threading.Event()

    def die() -> None:
        dying.set()
        raise SystemExit("on purpose")

    def fsync(descriptor: int) -> None:
        if (tmp_path / "1").exists() and not dying.is_set():  # the record is in place
            engine.post(die)
            assert dying.wait(20)
            while not engine._died:
                os.sched_yield()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert (await ckpt.save(1, TREE)).step == 1
    assert dying.is_set()
    await ckpt.close()


def test_a_forked_child_is_told_so_and_may_make_its_own(tmp_path: Path) -> None:
    out = children.output(
        """
        import os, signal, sys, threading, warnings
        import numpy as np
        from asyncckpt import blocking, errors
        from asyncckpt.stores.local import publish
        warnings.filterwarnings("ignore", message=".*fork.*")
        root = sys.argv[1]
        ckpt = blocking.Checkpointer(root)
        ckpt.save(1, {"w": np.arange(5)})
        renaming, forked, rename = threading.Event(), threading.Event(), publish.rename_noreplace

        def late(source, target):
            renaming.set()
            forked.wait()
            rename(source, target)

        publish.rename_noreplace = late
        pending = ckpt.start_save(2, {"w": np.arange(5)})
        renaming.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            publish.rename_noreplace = rename
            status = 1
            try:
                assert not pending.done() and not pending.cancel()
                saves = (lambda: ckpt.save(3, {}), pending.result, ckpt.wait)
                for call in (*saves, lambda: ckpt.restore(), ckpt.steps):
                    try:
                        call()
                    except errors.ClosedError as error:
                        assert "was created before this process was forked" in str(error), error
                    else:
                        raise AssertionError("no error")
                ckpt.close()
                with blocking.Checkpointer(root + "/child") as own:
                    own.save(1, {"w": np.arange(7)})
                    assert own.restore()["w"].tolist() == list(range(7))
                del ckpt
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        forked.set()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        pending.result()
        print(*ckpt.steps())
        ckpt.close()
        """,
        tmp_path / "run",
    )
    assert out.split() == ["1", "2"]
    assert blocking.restore(tmp_path / "run" / "child" / "1")["w"].tolist() == list(range(7))


def test_a_forked_child_that_enters_an_inherited_checkpointer_is_told_so(tmp_path: Path) -> None:
    out = children.output(
        """
        import asyncio, os, signal, sys, warnings
        import numpy as np
        import asyncckpt
        warnings.filterwarnings("ignore", message=".*fork.*")
        ckpt = asyncckpt.Checkpointer(sys.argv[1])
        asyncio.run(ckpt.save(1, {"w": np.arange(5)}))

        async def enter():
            async with ckpt:
                pass

        child = os.fork()
        if child == 0:
            signal.alarm(120)
            status = 1
            try:
                asyncio.run(enter())
            except asyncckpt.ClosedError as error:
                status = 0 if "was created before this process was forked" in str(error) else 2
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        asyncio.run(ckpt.close())
        """,
        tmp_path / "run",
    )
    assert out.split() == ["0"]


def test_a_process_that_ends_without_close_finishes_its_saves_and_warns(tmp_path: Path) -> None:
    child = children.start(
        """
        import sys, threading, warnings
        import numpy as np
        from asyncckpt import blocking
        from asyncckpt.stores.local import publish

        warned = threading.Event()

        def show(*args, shown=warnings.showwarning):
            shown(*args)
            warned.set()

        def late(source, target, rename=publish.rename_noreplace):
            assert target.endswith("1") or warned.wait(30)
            rename(source, target)

        warnings.showwarning = show
        publish.rename_noreplace = late
        ckpt = blocking.Checkpointer(sys.argv[1])
        ckpt.start_save(1, {"w": np.arange(2_000_000.0)})
        ckpt.start_save(2, {"w": np.arange(2_000_000.0)})
        """,
        tmp_path,
        warnings="default",
    )
    status, _, err = children.finish(child)
    assert status == 0, err
    assert "the process ends without close(); waiting up to 60 s for 1 save(s) in flight" in err
    for step in ("1", "2"):
        assert blocking.verify(tmp_path / step).ok


@pytest.mark.parametrize("fails", ["log", "stderr"])
def test_saves_in_flight_at_the_exit_are_finished_though_warnings_cannot_be_shown(
    tmp_path: Path, fails: str
) -> None:
    child = children.start(
        """
        import logging, sys, threading
        import numpy as np
        from asyncckpt import blocking
        from asyncckpt.flow import engine
        from asyncckpt.stores.local import publish

        class Failing(logging.Handler):
            def emit(self, record):
                raise OSError("no space left for the log")

        warned = threading.Event()

        def warn(message, warn=engine.warn):
            try:
                warn(message)
            finally:
                warned.set()

        def late(source, target, rename=publish.rename_noreplace):
            assert warned.wait(30)
            rename(source, target)

        engine.warn = warn
        publish.rename_noreplace = late
        if sys.argv[2] == "log":
            logging.getLogger("asyncckpt").addHandler(Failing())
        runs = [blocking.Checkpointer(f"{sys.argv[1]}/{name}") for name in "abc"]
        for run in runs:
            run.start_save(1, {"w": np.arange(1_000_000.0)})
        if sys.argv[2] == "stderr":
            sys.stderr.close()
        """,
        tmp_path,
        fails,
        warnings="default",
    )
    status, _, err = children.finish(child)
    assert status == 0, err
    for name in "abc":
        assert blocking.verify(tmp_path / name / "1").ok


@pytest.mark.parametrize("how", ["one-shot", "blocking", "async", "one-shot to a URL"])
def test_a_first_use_while_the_interpreter_exits_is_an_error_and_no_hang(
    tmp_path: Path, how: str
) -> None:
    out = children.output(
        """
        import asyncio, atexit, sys
        import numpy as np
        import asyncckpt
        from asyncckpt import blocking
        ckpt = blocking.Checkpointer(sys.argv[1])
        later = asyncckpt.Checkpointer(sys.argv[1])
        def save():
            state = {"w": np.arange(10.0)}
            try:
                if sys.argv[2] == "one-shot":
                    blocking.save(sys.argv[1] + "/x", state)
                elif sys.argv[2] == "one-shot to a URL":
                    blocking.save("s3://bucket/x", state)
                elif sys.argv[2] == "blocking":
                    ckpt.save(1, state)
                else:
                    asyncio.run(later.save(1, state))
            except asyncckpt.ResourceError as error:
                print(error)
        atexit.register(save)
        """,
        tmp_path,
        how,
    )
    assert "the interpreter is exiting" in out and "not in an atexit handler" in out


LATE_SAVES = {
    "atexit handler": "import atexit; atexit.register(save)",
    "thread": "threading.Thread(target=lambda: (threading.main_thread().join(), save())).start()",
    "__del__": """
class Trainer:
    def __del__(self, save=save):
        save()

trainer = Trainer()
trainer.itself = trainer
""",
}


@pytest.mark.parametrize("used", [True, False], ids=["used before", "first use"])
@pytest.mark.parametrize("late", LATE_SAVES.values(), ids=LATE_SAVES)
@pytest.mark.parametrize("call", ["ckpt.start_save(1, state)", "blocking.save(root + '/x', state)"])
def test_a_save_that_begins_while_the_interpreter_exits_is_an_error_and_no_loss(
    tmp_path: Path, used: bool, late: str, call: str
) -> None:
    out = children.output(
        f"""
import os, sys, threading
import numpy as np
from asyncckpt import ResourceError, blocking

root, state = sys.argv[1], {{"w": np.arange(1_000_000.0)}}
ckpt = blocking.Checkpointer(root)

def save():
    try:
        {call}
    except ResourceError as error:
        os.write(1, str(error).encode())
    ckpt.close()

if {used}:
    blocking.save(root + "/0", state)
    in_flight = blocking.Checkpointer(root)
    in_flight.start_save(2, state)
{late}
""",
        tmp_path,
    )
    assert "the interpreter is exiting" in out and "not in an atexit handler" in out
    assert blocking.Checkpointer(tmp_path).steps() == [0, 2][: 2 * used]


def test_an_event_loop_that_ends_without_close_finishes_its_saves_too(tmp_path: Path) -> None:
    children.output(
        """
        import asyncio, sys
        import numpy as np
        import asyncckpt
        async def main():
            ckpt = asyncckpt.Checkpointer(sys.argv[1])
            await ckpt.start_save(1, {"w": np.arange(2_000_000.0)})
        asyncio.run(main())
        """,
        tmp_path,
    )
    assert blocking.verify(tmp_path / "1").ok


def test_a_process_that_ends_by_an_exception_finishes_its_saves(tmp_path: Path) -> None:
    child = children.start(
        """
        import sys
        import numpy as np
        from asyncckpt import blocking
        ckpt = blocking.Checkpointer(sys.argv[1])
        ckpt.start_save(1, {"w": np.arange(2_000_000.0)})
        raise RuntimeError("the training failed")
        """,
        tmp_path,
    )
    status, _, err = children.finish(child)
    assert status == 1 and "the training failed" in err
    assert blocking.verify(tmp_path / "1").ok


def test_a_pending_save_that_outlives_all_modules_prints_nothing(tmp_path: Path) -> None:
    child = children.start(
        """if True:
        import sys
        import jax  # keeps frames and modules alive for longer than this package's
        import numpy as np
        from asyncckpt import blocking
        with blocking.Checkpointer(sys.argv[1]) as ckpt:
            pending = ckpt.start_save(1, {"w": np.arange(3.0)})
        """,
        tmp_path,
    )
    status, _, err = children.finish(child)
    assert (status, err) == (0, "")


@pytest.mark.parametrize("stream", range(3))
def test_a_closed_standard_stream_aborts_nothing(tmp_path: Path, stream: int) -> None:
    code = """if True:
        import sys
        import numpy as np
        from asyncckpt import blocking
        with blocking.Checkpointer(sys.argv[1]) as ckpt:
            ckpt.save(1, {"w": np.arange(9.0)})
        """
    child = ("/bin/sh", "-c", f'exec "$@" {stream}<&-', "sh", sys.executable, "-c", code)
    ended = subprocess.run((*child, str(tmp_path)), cwd=children.REPOSITORY, timeout=60)
    assert ended.returncode == 0
    assert blocking.verify(tmp_path / "1").ok


def test_a_process_whose_save_hangs_ends_within_its_exit_deadline(tmp_path: Path) -> None:
    child = children.start(
        HANGING_WRITE
        + """
LocalDataFile._write = hang
options = asyncckpt.SaveOptions(exit_deadline_s=0.5)
ckpt = blocking.Checkpointer(sys.argv[1], save_options=options)
pending = ckpt.start_save(1, {"w": np.arange(2_000_000.0)})
begun.wait()
print("ending", flush=True)
""",
        tmp_path,
        warnings="default",
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ending\n"
    begun = time.monotonic()
    status, _, err = children.finish(child)
    assert time.monotonic() - begun < 10
    assert status == 0
    assert "a save was abandoned: it did not finish within 0.5 s" in err
    assert blocking.Checkpointer(tmp_path).steps() == []


def test_a_process_with_several_hanging_saves_ends_within_one_exit_deadline(
    tmp_path: Path,
) -> None:
    child = children.start(
        HANGING_WRITE
        + """
LocalDataFile._write = hang
options = asyncckpt.SaveOptions(exit_deadline_s=4)
kept = []
for number in range(5):
    begun.clear()
    kept.append(blocking.Checkpointer(f"{sys.argv[1]}/{number}", save_options=options))
    kept.append(kept[-1].start_save(1, {"w": np.arange(2_000_000.0)}))
    begun.wait()
print("ending", flush=True)
""",
        tmp_path,
        warnings="default",
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ending\n"
    begun = time.monotonic()
    status, _, err = children.finish(child)
    assert time.monotonic() - begun < 15
    assert status == 0
    assert "a save was abandoned: it did not finish within 4 s" in err


async def test_a_crashed_attempt_is_swept_when_a_run_is_entered(tmp_path: Path) -> None:
    child = children.start(
        HANGING_WRITE
        + """
LocalDataFile._write = hang
ckpt = blocking.Checkpointer(sys.argv[1])
pending = ckpt.start_save(1, {"w": np.arange(2_000_000.0)})
begun.wait()
os._exit(9)
""",
        tmp_path,
    )
    assert (await in_thread(lambda: children.finish(child)))[0] == 9
    assert list((tmp_path / ".asyncckpt").rglob("*"))
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        assert await ckpt.steps() == []
    assert list(tmp_path.iterdir()) == []


class Foreign:
    """A store that is not ours: any error may come from it."""

    def __init__(self, root: Path) -> None:
        self._workers = Workers(2, "foreign")
        self.store = FaultStore(LocalStore(root, self._workers, is_valid=is_record))

    def fails(self, kind: str) -> None:
        self.store.script.append(Fault(kind, 0, error=RuntimeError(f"no {kind}")))

    def shutdown(self) -> None:
        self._workers.shutdown()


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    store = Foreign(tmp_path)
    yield store
    store.shutdown()


async def test_a_sweep_that_fails_in_any_way_is_logged_and_everything_released(
    foreign: Foreign, caplog: pytest.LogCaptureFixture
) -> None:
    foreign.fails("sweep")
    ckpt = asyncckpt.Checkpointer(foreign.store)
    assert (await ckpt.save(1, TREE)).step == 1
    runtime = ckpt._session.runtime
    assert runtime.pool.allocated_nbytes
    await ckpt.close()
    assert foreign.store.counts["sweep"] == foreign.store.counts["close"] == 1
    assert runtime.pool.allocated_nbytes == 0
    assert engine_threads() == []
    (told,) = caplog.records
    assert told.levelno == logging.WARNING and "could not be swept" in told.message
    assert told.exc_info and str(told.exc_info[1]) == "no sweep"
    async with asyncckpt.Checkpointer(foreign.store) as again:
        assert await again.steps() == [1]


def test_a_sweep_that_fails_is_logged_without_async_too(
    foreign: Foreign, caplog: pytest.LogCaptureFixture
) -> None:
    foreign.fails("sweep")
    with caplog.at_level(logging.CRITICAL, "asyncckpt"):
        ckpt = blocking.Checkpointer(foreign.store)
        ckpt.save(1, TREE)
        ckpt.close()
    assert foreign.store.counts["close"] == 1
    assert engine_threads() == []


async def test_a_sweep_that_is_cancelled_releases_everything(foreign: Foreign) -> None:
    ckpt = asyncckpt.Checkpointer(foreign.store)
    await ckpt.save(1, TREE)
    core = ckpt._session
    gate = Gate()
    foreign.store.script.append(Fault("sweep", gate=gate))
    releasing = core.runtime.engine.submit(core._release)
    await core.call(gate.reached.wait).wait()
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing.wait()
    assert foreign.store.counts["close"] == 1
    assert core.runtime.pool.allocated_nbytes == 0
    await ckpt.close()


async def test_a_store_that_cannot_be_closed_leaves_no_thread(foreign: Foreign) -> None:
    foreign.fails("close")
    ckpt = asyncckpt.Checkpointer(foreign.store)
    await ckpt.save(1, TREE)
    with pytest.raises(RuntimeError, match="no close"):
        await ckpt.close()
    assert engine_threads() == []
    ordinary = blocking.Checkpointer(foreign.store)
    ordinary.save(2, TREE)
    with pytest.raises(RuntimeError, match="no close"):
        ordinary.close()
    assert engine_threads() == []


@pytest.mark.parametrize("one_shot", [True, False], ids=["one-shot", "block"])
@pytest.mark.parametrize("blocked", [False, True], ids=["async", "blocking"])
async def test_a_store_that_cannot_be_closed_replaces_no_error(
    foreign: Foreign, one_shot: bool, blocked: bool
) -> None:
    foreign.fails("close")

    async def restore() -> None:
        if one_shot:
            await asyncckpt.restore((foreign.store, "1"))
        async with asyncckpt.Checkpointer(foreign.store) as ckpt:
            await ckpt.restore(1)

    def restore_blocking() -> None:
        if one_shot:
            blocking.restore((foreign.store, "1"))
        with blocking.Checkpointer(foreign.store) as ckpt:
            ckpt.restore(1)

    with pytest.raises(CheckpointNotFoundError) as caught:
        await (in_thread(restore_blocking) if blocked else restore())
    assert caught.value.__notes__ == ["closing failed, too: RuntimeError: no close"]
    assert engine_threads() == []


async def test_a_store_that_cannot_be_closed_keeps_no_memory_and_no_other_store_open(
    foreign: Foreign, tmp_path: Path
) -> None:
    ckpt = asyncckpt.Checkpointer(foreign.store)
    await ckpt.save(1, TREE)
    runtime = ckpt._session.runtime
    assert runtime.pool.allocated_nbytes
    others = [FaultStore(foreign.store.inner) for _ in range(2)]
    runtime._stores[:] = [others[0], foreign.store, others[1]]
    foreign.fails("close")
    with pytest.raises(RuntimeError, match="no close"):
        await ckpt.close()
    assert [store.counts["close"] for store in runtime._stores] == [1, 1, 1]
    assert runtime.pool.allocated_nbytes == 0


@pytest.mark.parametrize("blocked", [False, True], ids=["async", "blocking"])
async def test_a_runtime_whose_store_cannot_be_closed_leaves_no_thread(
    foreign: Foreign, blocked: bool
) -> None:
    foreign.fails("close")
    runtime = Runtime("asyncckpt-test", host_memory_nbytes=None)
    runtime.store(foreign.store, direct_io="auto", storage_options=None)
    await runtime.engine.submit(foreign.store.names).wait()
    assert "asyncckpt-test" in engine_threads()
    closing = runtime.aclose()
    with pytest.raises(RuntimeError, match="no close"):
        await (in_thread(lambda: run_blocking(closing)) if blocked else closing)
    assert engine_threads() == []


async def test_a_save_is_committed_while_the_callers_loop_is_blocked(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        state = {"w": np.arange(2_000_000.0), "step": 1}
        pending = await ckpt.start_save(1, state)
        # A train step that holds this loop's thread: nothing else runs on it meanwhile.
        end = time.monotonic() + 60
        while not pending.done() and time.monotonic() < end:
            time.sleep(0.01)
        assert pending.done()
        assert (tmp_path / "1" / "checkpoint.json").exists()
        await pending


async def test_a_restore_goes_on_while_the_callers_loop_is_blocked(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        target = {"w": np.zeros(50_000), "step": 1}
        done = threading.Event()
        request, _, _ = ckpt._session.restore_request(
            "into",
            target,
            leaves="numpy",
            include=None,
            strict=True,
            cast=False,
            options=None,
            progress=None,
        )
        job = ckpt._session.call(lambda: ckpt._session.reads.restore(1, request))
        job.future.add_done_callback(lambda _: done.set())
        assert done.wait(30)  # this thread's loop stands still meanwhile
        await job.wait()
        assert target["w"].tobytes() == TREE["w"].tobytes()


def test_logging_is_silent_by_default() -> None:
    child = children.start(
        """
        import logging
        import asyncckpt
        logger = logging.getLogger("asyncckpt")
        assert logger.level == logging.NOTSET and logger.propagate
        logger.error("unheard")
        """
    )
    assert children.finish(child) == (0, "", "")


def test_windows_is_refused_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncckpt import runtime

    class Windows:
        name = "nt"

    monkeypatch.setattr(runtime, "os", Windows)
    with pytest.raises(UsageError, match="on Windows use WSL"):
        asyncckpt.Checkpointer(tmp_path)


def test_a_framework_other_than_asyncio_is_told_what_to_call_and_nothing_begins(
    tmp_path: Path,
) -> None:
    """As trio drives coroutines: without an event loop of asyncio."""

    def drive(coroutine: Any) -> None:
        with pytest.raises(UsageError, match=r"needs an asyncio event loop.*trio\.to_thread"):
            coroutine.send(None)

    drive(asyncckpt.save(tmp_path / "x", TREE))
    drive(asyncckpt.restore(tmp_path / "x"))
    drive(asyncckpt.restore_into(tmp_path / "x", TREE))
    drive(asyncckpt.inspect(tmp_path / "x"))
    drive(asyncckpt.verify(tmp_path / "x"))
    drive(asyncckpt.convert(tmp_path / "x", tmp_path / "y"))
    drive(asyncckpt.export(tmp_path / "x", tmp_path / "y"))
    drive(asyncckpt.diff(tmp_path / "x", tmp_path / "y"))
    drive(asyncckpt.collect_garbage(tmp_path))
    drive(asyncckpt.tune("memory://run"))
    ckpt = asyncckpt.Checkpointer(tmp_path)
    drive(ckpt.__aenter__())
    drive(ckpt.save(1, TREE))
    drive(ckpt.start_save(1, TREE))
    drive(ckpt.close())
    assert engine_threads() == []
    drive(ckpt.restore(1))
    drive(ckpt.steps())
    run_blocking(ckpt.close())
    assert engine_threads() == []
    assert list(tmp_path.iterdir()) == []
