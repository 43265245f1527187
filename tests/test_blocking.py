"""The blocking facade: the same names and promises, and what Ctrl-C does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import blocking
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.torch import TorchAdapter
from asyncckpt.coordinators.choice import SingleProcess
from asyncckpt.errors import CheckpointExistsError, SaveAbortedError, StoreError, UsageError
from asyncckpt.flow.driver import run_blocking
from tests import children
from tests.script import Script, in_thread
from tests.signals import Expired, raised_once
from tests.watch import collect_others, nothing_left_behind

TREE: dict[str, Any] = {"w": np.arange(50_000.0), "step": 1}

HELD_WRITE = """
import os, signal, sys, threading
from pathlib import Path
import numpy as np
from asyncckpt import blocking
from asyncckpt.flow.engine import Job
from asyncckpt.flow.driver import run_blocking
from asyncckpt.stores.local.datafile import LocalDataFile

def tell(text):  # in one piece, from any thread
    os.write(1, text.encode() + b"\\n")

cancel = Job._cancel
once = threading.Lock()
def cancelled(self):
    cancel(self)
    if once.acquire(blocking=False):
        tell("cancelling")  # from here on the save can no longer be committed
Job._cancel = cancelled

real = LocalDataFile._write
first = threading.Lock()
def held(self, offset, data):
    if first.acquire(blocking=False):  # the index is written meanwhile
        tell("writing")
        sys.stdin.readline()
    real(self, offset, data)

def interrupted(number, frame):
    tell("signal")
    signal.default_int_handler(number, frame)

signal.signal(signal.SIGINT, interrupted)
root = Path(sys.argv[1])
tree = {"w": np.arange(50_000.0)}
blocking.save(root / "0", tree)
LocalDataFile._write = held
"""


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


FUNCTIONS = [name for name in blocking.__all__ if name not in ("Checkpointer", "PendingSave")]
COROUTINE = "CoroutineType[Any, Any, "

METHODS = [name for name in vars(asyncckpt.Checkpointer) if not name.startswith("_")]


def twins() -> list[tuple[str, Any, Any]]:
    """Every name of the facade with what it is in the blocking one and in the async one."""
    both = [(name, getattr(blocking, name), getattr(asyncckpt, name)) for name in FUNCTIONS]
    kinds = blocking.Checkpointer, asyncckpt.Checkpointer
    return both + [
        (f"Checkpointer.{name}", *(getattr(kind, name) for kind in kinds)) for name in METHODS
    ]


@pytest.mark.parametrize(
    ("own", "other"), [pytest.param(own, other, id=name) for name, own, other in twins()]
)
def test_signatures_and_docstrings_are_those_of_the_async_facade(own: Any, other: Any) -> None:
    assert inspect.iscoroutinefunction(other) and not inspect.iscoroutinefunction(own)
    signature = inspect.signature(own)
    assert signature == inspect.signature(other)
    kinds = {p.kind for p in signature.parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds  # `help` shows every argument
    assert inspect.getdoc(own) == inspect.getdoc(other) and inspect.getdoc(own)
    assert own.__module__ == "asyncckpt.blocking" and own.__name__ == other.__name__


def test_the_blocking_facade_lacks_no_name() -> None:
    coroutines = {
        name for name in asyncckpt.__all__ if inspect.iscoroutinefunction(getattr(asyncckpt, name))
    }
    assert coroutines == set(FUNCTIONS)
    assert {name for name in dir(blocking.Checkpointer) if not name.startswith("_")} == set(METHODS)
    kinds = blocking.Checkpointer, asyncckpt.Checkpointer
    assert inspect.signature(kinds[0]) == inspect.signature(kinds[1])
    assert blocking.PendingSave is asyncckpt.PendingSave


def awaited(shown: str) -> str:
    """A shown type with the result of each coroutine in its place."""
    begin = shown.find(COROUTINE)
    if begin < 0:
        return shown
    end, depth = begin + len(COROUTINE), 1
    while depth:
        depth += {"[": 1, "]": -1}.get(shown[end], 0)
        end += 1
    result = shown[begin + len(COROUTINE) : end - 1]
    if " | " in result:
        result = f"({result})"  # as pyright shows the result of a callable
    return shown[:begin] + result + awaited(shown[end:])


def test_type_checkers_see_the_signatures_of_the_async_facade(tmp_path: Path) -> None:
    twin = [(f"blocking.{name}", f"asyncckpt.{name}") for name in FUNCTIONS]
    twin += [(f"run.{name}", f"other.{name}") for name in METHODS]
    calls = {
        "run.restore(like={'a': 1})": "dict[str, int]",
        "run.restore(leaves='jax')": "Any",
        "run.restore(like=None)": "Any",
        "blocking.restore('x', like=None)": "Any",
        "other.save(np.int64(1), {}, metrics={'loss': np.float32(1)})": (
            "CoroutineType[Any, Any, SaveReport]"
        ),
        "blocking.inspect((store, 'final'))": "CheckpointInfo",
        "asyncckpt.Checkpointer(store, keep=Newest())": "Checkpointer",
        "asyncckpt.torch.StorageWriter('x')": "StorageWriter",
        "blocking.restore('x', like=[1.0], strict=False)": "list[float]",
        "run.start_save(1, {}).result()": "SaveReport",
    }
    shown = [name for pair in twin for name in pair] + list(calls)
    lines = [
        "from collections.abc import Iterator, Sequence",
        "import numpy as np",
        "import asyncckpt",
        "from asyncckpt import blocking",
        "from asyncckpt.ports import Store",
        "class Newest:",
        "    def keep(self, steps: Sequence[int], metrics: object) -> Iterator[int]:",
        "        yield steps[-1]",
        "def opened() -> Store: ...  # pyright: ignore[reportReturnType]",
        "store = opened()",
        "run, other = blocking.Checkpointer('x'), asyncckpt.Checkpointer('x')",
        *(f"reveal_type({name})" for name in shown),
        "run.save(1, {}, overwirte=True)",
    ]
    (tmp_path / "revealed.py").write_text("\n".join(lines))
    package = Path(__file__).parents[1]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(package)]}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [line["message"] for line in found if line["severity"] == "error"]
    assert errors == ['No parameter named "overwirte"']
    texts = [line["message"].partition('" is "')[2][:-1] for line in found]
    types = dict(zip(shown, filter(None, texts), strict=True))
    for own, async_ in twin:
        expected = awaited(types[async_])
        assert expected != types[async_]  # it is a coroutine, and this compares more than nothing
        assert types[own] == expected
    assert {call: types[call] for call in calls} == calls


def test_a_run_from_an_ordinary_loop(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(2)) as ckpt:
        assert ckpt.latest_step() is None
        assert ckpt.prepare(TREE) > 0
        for step in range(3):
            pending = ckpt.start_save(step, {**TREE, "step": step})
        report = pending.result()
        assert report.step == 2 and pending.result() is report
        assert ckpt.steps() == [1, 2]
        assert ckpt.restore()["step"] == 2
        target = {"w": np.zeros(50_000), "step": 1}
        assert ckpt.restore_into(target, step=1).step == 1
        assert target["w"].tobytes() == TREE["w"].tobytes()
        assert ckpt.inspect(1).step == 1
        assert ckpt.verify().ok
        with pytest.raises(CheckpointExistsError):
            ckpt.save(2, TREE)
        ckpt.save(2, TREE, overwrite=True)
        assert ckpt.delete_after(1) == [2]
        ckpt.delete(1)
        ckpt.wait()
        assert ckpt.steps() == []
        assert "saves in flight" in repr(ckpt)
    assert list(tmp_path.iterdir()) == []


def test_one_shot_functions(tmp_path: Path) -> None:
    place = tmp_path / "x"
    assert blocking.save(place, TREE).leaf_count == 2
    assert blocking.restore(place)["step"] == 1
    assert blocking.restore_into(place, {"w": np.zeros(50_000), "step": 1}).leaf_count == 2
    assert blocking.inspect(place)["w"].shape == (50_000,)
    assert blocking.verify(place).ok


def test_restore_hands_its_report_to_a_callback(tmp_path: Path) -> None:
    reports: list[asyncckpt.RestoreReport] = []
    blocking.save(tmp_path / "x", TREE, metadata={"lr": 0.1})
    assert blocking.restore(tmp_path / "x", on_report=reports.append)["step"] == 1
    with blocking.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, TREE)
        ckpt.restore(like=TREE, on_report=reports.append)
        with pytest.raises(UsageError, match="on_report=5: pass a function of one RestoreReport"):
            ckpt.restore(on_report=5)  # type: ignore[arg-type]
    assert [(report.step, report.leaf_count) for report in reports] == [(None, 2), (3, 2)]
    assert reports[0].metadata == {"lr": 0.1}


def test_a_misspelt_keyword_is_refused_before_anything_happens(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'overwirte'; the optional ones are metadata, overwrite"):
        blocking.save(tmp_path / "x", TREE, overwirte=True)  # type: ignore[call-arg]
    assert not list(tmp_path.iterdir())


def test_a_warning_names_the_line_of_the_call(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", TREE)
    blocking.convert(tmp_path / "x", tmp_path / "x.safetensors")

    async def awaiting() -> None:
        await asyncckpt.restore(tmp_path / "x.safetensors")

    collect_others()
    with pytest.warns(asyncckpt.RestoreWarning) as caught:
        blocking.restore(tmp_path / "x.safetensors")
        asyncio.run(awaiting())
    ours = [w for w in caught if issubclass(w.category, asyncckpt.RestoreWarning)]
    assert len(ours) >= 2 and {Path(warning.filename) for warning in ours} == {Path(__file__)}


def test_leaving_the_block_leaves_nothing_behind(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", TREE)
    with nothing_left_behind(), blocking.Checkpointer(tmp_path) as ckpt:
        ckpt.start_save(1, TREE)
    assert blocking.verify(tmp_path / "1").ok


async def test_it_works_inside_a_running_loop(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        pending = ckpt.start_save(1, TREE)
        assert pending.result().step == 1
        assert (await pending).step == 1  # awaiting it works as well
        assert ckpt.restore()["step"] == 1
    blocking.save(tmp_path / "x", TREE)
    assert blocking.restore(tmp_path / "x")["step"] == 1


def test_one_checkpointer_serves_several_threads(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        threads = [
            threading.Thread(target=ckpt.save, args=(step, TREE), daemon=True) for step in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert ckpt.steps() == [0, 1, 2, 3]


def test_result_stops_waiting_after_its_timeout(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        pending = ckpt.start_save(1, TREE)
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        assert not pending.done()
        publish.go()
        assert pending.result(60).step == 1


def test_a_failure_raised_by_result_is_seen_and_another_is_raised_once(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        script.fail("seal", StoreError("disk on fire"))
        pending = ckpt.start_save(1, TREE)
        for _ in range(2):
            with pytest.raises(StoreError, match="disk on fire"):
                pending.result()
        ckpt.wait()
        script.fail("seal", StoreError("disk on fire"))
        ckpt.start_save(2, TREE)
        with pytest.raises(StoreError, match="disk on fire"):
            ckpt.wait()
        ckpt.save(3, TREE)


def test_the_exception_of_the_body_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught, blocking.Checkpointer(tmp_path) as ckpt:
        Script(ckpt).fail("publish", StoreError("disk on fire"))
        ckpt.start_save(1, TREE)
        raise KeyError("body")
    (note,) = caught.value.__notes__
    assert note.startswith("a save failed, too: StoreError: disk on fire\nthis ended the save of ")


@pytest.mark.parametrize("fails", [False, True])
def test_a_generator_that_is_closed_inside_the_block_leaves_it_as_any_other_exception(
    tmp_path: Path, fails: bool
) -> None:
    def train() -> Iterator[blocking.PendingSave]:
        with blocking.Checkpointer(tmp_path) as ckpt:
            script = Script(ckpt)
            if fails:
                script.fail("publish", StoreError("disk on fire"))
            held = script.hold("seal")
            pending = ckpt.start_save(1, TREE)
            held.go()
            yield pending

    steps = train()
    pending = next(steps)
    with pytest.raises(StoreError, match="disk on fire") if fails else contextlib.nullcontext():
        steps.close()
    assert pending.done()
    assert not [t for t in threading.enumerate() if t.name.startswith("asyncckpt")]


def test_cancel_aborts_the_save(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        write = Script(ckpt).hold("write")
        pending = ckpt.start_save(1, TREE)
        write.reached_blocking()
        assert pending.cancel()
        with pytest.raises(SaveAbortedError):
            pending.result()
        assert ckpt.steps() == []


@pytest.mark.parametrize(
    "call",
    [
        "ckpt.save(1, tree)",
        "pending = ckpt.start_save(1, tree); tell('started'); pending.result(); ckpt.wait()",
        "blocking.save(root / '1', tree)",
    ],
    ids=["save", "result", "one-shot"],
)
def test_ctrl_c_aborts_waits_for_the_clean_up_and_raises(tmp_path: Path, call: str) -> None:
    waits_only = "result" in call
    child = children.start(
        HELD_WRITE
        + f"""
ckpt = blocking.Checkpointer(root)
try:
    {call}
except KeyboardInterrupt:
    tell("interrupted")
if {waits_only}:
    (pending,) = ckpt._session.saves.pending()
    pending.cancel()
    run_blocking(ckpt._session.idle())
    ckpt._session.saves.unseen_error()
print(*ckpt.steps(), flush=True)
print(*sorted(p.name for p in root.rglob("*") if not p.is_dir() and "0" not in p.parts))
LocalDataFile._write = real
ckpt.save(2, tree)
ckpt.close()
""",
        tmp_path,
    )
    # The write may begin before `start_save` has returned, which is to be interrupted later.
    begun = {line(child) for _ in range(1 + waits_only)}
    assert begun == ({"writing", "started"} if waits_only else {"writing"})
    child.send_signal(signal.SIGINT)
    assert line(child) == "signal"
    if waits_only:
        # Waiting for a result is no save of its own: Ctrl-C stops the waiting.
        assert line(child) == "interrupted"
        assert line(child) == "cancelling"
        say(child)
    else:
        assert line(child) == "cancelling"
        say(child)
        assert line(child) == "interrupted"
    status, out, err = children.finish(child)
    assert status == 0, err
    assert out.splitlines() == ["0", ""]
    assert blocking.Checkpointer(tmp_path).steps() == [0, 2]


@pytest.mark.parametrize("block", [False, True], ids=["save", "with"])
def test_a_second_ctrl_c_abandons_the_clean_up(tmp_path: Path, block: bool) -> None:
    body = "with blocking.Checkpointer(root) as ckpt: ckpt.save(1, tree)"
    child = children.start(
        HELD_WRITE
        + f"""
try:
    {body if block else "blocking.Checkpointer(root).save(1, tree)"}
except KeyboardInterrupt:
    tell("interrupted")
    raise SystemExit(5)
""",
        tmp_path,
    )
    assert line(child) == "writing"
    child.send_signal(signal.SIGINT)
    assert line(child) == "signal"
    assert line(child) == "cancelling"  # the clean-up is being waited for
    child.send_signal(signal.SIGINT)
    assert line(child) == "signal"
    begun = time.monotonic()
    assert line(child) == "interrupted"  # although the write never returns
    status, _, err = children.finish(child)
    assert status == 5, err
    assert time.monotonic() - begun < 15
    # The directory of the dead attempt is swept by the next run.
    with blocking.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_ctrl_c_while_the_block_is_left_aborts_the_saves_in_flight(tmp_path: Path) -> None:
    child = children.start(
        HELD_WRITE
        + """
try:
    with blocking.Checkpointer(root) as ckpt:
        idle = ckpt._session.idle
        async def leaving():
            tell("leaving")  # not in the block, whose own exception does not abort the save
            await idle()
        ckpt._session.idle = leaving
        ckpt.start_save(1, tree)
except KeyboardInterrupt:
    tell("interrupted")
""",
        tmp_path,
    )
    assert {line(child), line(child)} == {"writing", "leaving"}
    child.send_signal(signal.SIGINT)
    assert line(child) == "signal"
    assert line(child) == "cancelling"
    say(child)
    assert line(child) == "interrupted"
    assert children.finish(child)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("preemption", [False, True])
def test_a_signal_handler_may_save_wherever_it_interrupts_a_save(
    tmp_path: Path, preemption: bool
) -> None:
    class Signalling(SingleProcess):
        """A coordinator during whose use a signal arrives."""

        put = put_once = look = wait = list = delete = SingleProcess.close
        signals = 0

        @property
        def process_count(self) -> int:  # type: ignore[override]
            if self.signals:
                self.signals -= 1
                signal.raise_signal(signal.SIGUSR1)
            return 1

    coordinator = Signalling()
    before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(ckpt.save(9, TREE)))
    saved: list[Any] = []
    try:
        with blocking.Checkpointer(
            tmp_path, coordinator=coordinator, preemption=preemption
        ) as ckpt:
            coordinator.signals = 1
            ckpt.save(1, TREE)
            assert len(saved) == 1 and ckpt.steps() == [1, 9]
    finally:
        signal.signal(signal.SIGUSR1, before)


CALLS: dict[str, tuple[str, Callable[[blocking.Checkpointer, Any], Any]]] = {
    "save": ("seal", lambda ckpt, tree: ckpt.save(1, tree)),
    "start_save": ("begin", lambda ckpt, tree: ckpt.start_save(1, tree)),
    "restore_into": ("read_into", lambda ckpt, tree: ckpt.restore_into(tree)),
}


@pytest.mark.parametrize("error", [Expired, SystemExit])
@pytest.mark.parametrize(("kind", "call"), CALLS.values(), ids=CALLS)
def test_an_exception_of_a_signal_handler_is_raised_once_the_call_has_let_go_of_the_tree(
    tmp_path: Path,
    error: type[BaseException],
    kind: str,
    call: Callable[[blocking.Checkpointer, Any], Any],
) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, TREE)
        held, jobs = Script(ckpt).hold(kind), []

        def reached() -> None:
            held.reached_blocking()
            jobs.extend(ckpt._session.runtime.engine._jobs.values())

        with raised_once(error, reached), pytest.raises(error):
            call(ckpt, {"w": np.zeros(50_000), "step": 1})
        assert jobs and all(job.done() for job in jobs)
        assert ckpt.steps() == [0]


def test_an_exception_of_a_signal_handler_never_ends_the_main_thread_for_later_calls() -> None:
    """CPython 3.11 ends it for `threading` if the handler raises inside of `Thread.is_alive`."""
    out = children.output(
        """
        import os, sys, tempfile
        from asyncckpt import blocking

        class Expired(Exception):
            pass

        def signalled(frame, event, _):
            if frame.f_code.co_name == "_wait_for_tstate_lock":
                sys.setprofile(None)
                raise Expired

        with tempfile.TemporaryDirectory() as root:
            ckpt = blocking.Checkpointer(root)
            ckpt.save(0, {"a": 1})
            sys.setprofile(signalled)
            try:
                ckpt.save(1, {"a": 1})
            except Expired:
                print("expired")
            sys.setprofile(None)
            ckpt.save(2, {"a": 1})
            blocking.save(os.path.join(root, "once"), {"a": 1})
            ckpt.close()
        """
    )
    assert out == ""


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("call", ["save", "restore"])
def test_a_timeout_of_a_signal_handler_is_not_blamed_on_a_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    leaf = np.ones(3, ">f4") if kind == "numpy" else torch.ones(3)
    adapter = NumpyAdapter if kind == "numpy" else TorchAdapter
    blocking.save(tmp_path / "x", {"a": leaf})
    name = "source" if call == "save" else "target"
    usual = getattr(adapter, name)

    def expired(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(adapter, name, usual)  # a signal comes once
        raise Expired

    monkeypatch.setattr(adapter, name, expired)
    with pytest.raises(Expired):
        if call == "save":
            blocking.save(tmp_path / "y", {"a": leaf})
        else:
            blocking.restore(tmp_path / "x", like={"a": leaf})
    blocking.save(tmp_path / "y", {"a": leaf})


@pytest.mark.parametrize("call", ["start_save", "save", "restore_into"])
def test_an_exception_of_a_signal_handler_anywhere_in_a_call_ends_what_the_call_has_begun(
    tmp_path: Path, call: str
) -> None:
    """Also between the moment at which the engine gets the work and the wait for it."""

    def interrupted_at(number: int) -> bool:
        left = number

        def signalled(frame: FrameType, event: str, _: object) -> None:
            # Where a signal may be handled: at the begin of a function and after a call.
            nonlocal left
            ours = frame.f_globals["__name__"].startswith("asyncckpt.")
            returns = event == "return" and frame.f_code in (run_blocking.__code__, outer.__code__)
            if ours and engine._jobs and event != "c_call" and not returns:
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise Expired

        sys.setprofile(signalled)
        try:
            CALLS[call][1](ckpt, tree)
        except Expired:
            return True
        finally:
            sys.setprofile(None)
        return False

    tree, outer = {"w": np.zeros(50_000), "step": 1}, blocking.Checkpointer.save
    for number in itertools.count(1):
        with blocking.Checkpointer(tmp_path / str(number)) as ckpt:
            ckpt.save(0, TREE)
            engine = ckpt._session.runtime.engine
            while engine._jobs:
                time.sleep(0.001)
            if not interrupted_at(number):
                break
            assert not [job for job in engine._jobs.values() if job._at_end or not job.drained]
    assert number > 20


@pytest.mark.parametrize("error", [Expired, SystemExit])
@pytest.mark.parametrize("kind", ["seal", "close"])
@pytest.mark.parametrize("body", [None, KeyError("body")], ids=["ends", "fails"])
def test_an_exception_of_a_signal_handler_while_the_block_is_left_comes_out_as_itself(
    tmp_path: Path, error: type[BaseException], kind: str, body: Exception | None
) -> None:
    def leave() -> None:
        with blocking.Checkpointer(tmp_path) as ckpt:
            script, core = Script(ckpt), ckpt._session
            held = script.hold(kind)
            if kind == "close":  # the save has failed, and the release is interrupted
                core.runtime._stores[:] = [script.store]
                script.fail("seal", StoreError("disk on fire"))
            idle, closes = core.idle, threading.Event()

            async def leaving() -> None:
                closes.set()
                await idle()

            def reached() -> None:
                assert closes.wait(30)
                held.reached_blocking()

            core.idle = leaving  # type: ignore[method-assign]
            stack.enter_context(raised_once(error, reached))
            pending.append(ckpt.start_save(1, TREE))
            if body is not None:
                raise body

    pending: list[blocking.PendingSave] = []
    with contextlib.ExitStack() as stack, pytest.raises(error) as caught:
        leave()
    assert type(caught.value) is error and pending[0].done()
    assert blocking.Checkpointer(tmp_path).steps() == []


@pytest.mark.parametrize(
    "call", ["ckpt.steps()", "ckpt.save(2, tree)", "ckpt.start_save(2, tree).result()"]
)
def test_ctrl_c_inside_a_condition_leaves_the_engine_alive(tmp_path: Path, call: str) -> None:
    """A signal may be handled where Python code holds a lock that no block will release."""
    out = children.output(
        f"""
import faulthandler, sys, threading
import numpy as np
from asyncckpt import blocking

faulthandler.dump_traceback_later(60, exit=True)
root, tree = sys.argv[1], {{"w": np.arange(10.0)}}
enter = threading.Condition.__enter__.__code__

def interrupted_at(number, call):
    left = number
    def trace(frame, event, _):
        nonlocal left
        if event == "return" and frame.f_code is enter:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)

number = 1
while True:
    ckpt = blocking.Checkpointer(f"{{root}}/{{number}}")
    ckpt.save(1, tree)
    interrupted = interrupted_at(number, lambda: {call})
    ckpt.wait()
    assert 1 in ckpt.steps()
    ckpt.close()
    if not interrupted:
        break
    number += 1
print("closed", number)
""",
        tmp_path,
    )
    assert out.startswith("closed")


def test_ctrl_c_in_asyncio_run_aborts_the_save_and_cleans_up(tmp_path: Path) -> None:
    child = children.start(
        HELD_WRITE
        + """
import asyncio
import asyncckpt

signal.signal(signal.SIGINT, signal.default_int_handler)
async def main():
    cancel = signal.getsignal(signal.SIGINT)
    def handler(number, frame):
        cancel(number, frame)
        tell("signal")
    signal.signal(signal.SIGINT, handler)
    async with asyncckpt.Checkpointer(root) as ckpt:
        try:
            await ckpt.save(1, tree)
        except asyncio.CancelledError:
            print("cancelled", await ckpt.steps(), flush=True)
            raise
try:
    asyncio.run(main())
except KeyboardInterrupt:
    tell("interrupted")
""",
        tmp_path,
    )
    assert line(child) == "writing"
    child.send_signal(signal.SIGINT)
    assert line(child) == "signal"
    assert line(child) == "cancelling"
    say(child)
    assert children.finish(child)[:2] == (0, "cancelled [0]\ninterrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


async def test_a_blocked_thread_does_not_block_the_loops_of_others(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        saving = in_thread(lambda: ckpt.save(1, TREE))
        await asyncio.sleep(0)
        assert not saving.done()
        publish.go()
        assert (await saving).step == 1


@pytest.mark.parametrize("kind", [asyncckpt.Checkpointer, blocking.Checkpointer])
@pytest.mark.parametrize("to_copy", [pickle.dumps, copy.deepcopy])
def test_what_holds_a_checkpointer_cannot_be_sent_to_another_process(
    tmp_path: Path, kind: Callable[[Path], Any], to_copy: Callable[[object], object]
) -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled or copied: .* a new Checkpointer in"):
        to_copy({"dataset": kind(tmp_path)})
