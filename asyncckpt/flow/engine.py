"""Engine: a thread with an event loop that runs every pipeline coroutine of a `Checkpointer`.

The caller's loop may block for seconds without slowing a save. The async and blocking facades share
all logic: each submits a coroutine to the engine and waits for it.
"""

# Rule 1: a job's future resolves when its task has ended, not when it is cancelled, so callers may
#   reuse their arguments once a wait has returned.
#   (test_a_cancelled_wait_returns_after_the_jobs_clean_up)
# Rule 2: a wait that is cancelled, or interrupted by a signal handler's exception, cancels the job
#   and waits for its end, through repeated cancellations. This terminates because every job bounds
#   its clean-up (flow/shield.py, flow/threads.py). A coroutine that is being closed cannot wait: it
#   only cancels the job. (test_an_exception_of_a_signal_handler_ends_the_job_first)
# Rule 3: a callback that blocks on the engine's own thread would wait for itself: it is refused
#   before it waits. (test_blocking_on_the_engines_own_thread_is_refused_instead_of_a_deadlock)
# Rule 4: only a running thread accepts jobs. `_loop` and `_thread` are assigned after `start()` has
#   returned; otherwise a failed start would leave an engine that accepts jobs and runs none.
#   (test_an_engine_whose_thread_cannot_start_says_so_and_may_start_later)
#   If a signal handler's exception interrupts `start()`, the thread may begin later or never: a
#   thread whose loop was not assigned ends at once.
#   (test_an_exception_of_a_signal_handler_while_the_thread_starts_leaves_none)
# Rule 5: `closed` is checked under `_lock` together with the post to the loop: a job either
#   reaches the loop before it stops, and is cancelled there, or is refused.
# Rule 6: the engine's own work per chunk is microseconds; everything heavy runs in `Workers`.

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from asyncckpt.errors import (
    AsyncCheckpointError,
    ClosedError,
    EngineDiedError,
    ResourceError,
    SaveAbortedError,
    UsageError,
)
from asyncckpt.flow.caller import CallerThread
from asyncckpt.flow.driver import abort_with_call, blocks_here, check_loop, run_blocking
from asyncckpt.flow.threads import Outcome, Workers, finished, raisable, seen, thread_error
from asyncckpt.log import logger
from asyncckpt.options import ABANDON_S, CLEANUP_S

T = TypeVar("T")

IO_THREADS = 4
"""With two to four direct writes of 8 MiB in flight, the measured disks reach their top speed."""

COMPUTE_THREADS_MAX = 8
"""Eight threads that copy or checksum exhaust the memory bandwidth."""

EXIT_CLEANUP_S = 1.0
"""Time for a save that is aborted at process exit to remove its files."""


class Job(Generic[T]):
    """One coroutine that runs on the engine.

    Attributes:
        future: resolves when the task has ended.
        caller: runs calls of the coroutine in the thread that waits for it; None for most jobs.
        drained: whether the process waits for the job at exit, as for a save.
        cancelled: whether the engine has received a call of `cancel`.

    Args:
        at_end: called on the engine with the future once it is resolved.
    """

    def __init__(
        self, engine: Engine, at_end: Callable[[Future[Any]], object] | None = None
    ) -> None:
        self.future: Outcome[T] = Outcome()
        self.caller: CallerThread | None = None
        self.drained = False
        self._engine = engine
        self._task: asyncio.Task[T] | None = None
        self.cancelled = False
        self._at_end = at_end

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self.future.done()

    @property
    def forked(self) -> bool:
        """Whether this process was forked after the engine was created."""
        return self._engine.forked

    def cancel(self) -> None:
        """Cancel the task; its clean-up still runs. From any thread."""
        self._engine.post(self._cancel)

    async def wait(self) -> T:
        """Return the job's result.

        Cancellation, or a signal handler's exception (Ctrl-C, a timeout): cancels the job, waits
        for its clean-up, then raises.

        Raises:
            UsageError: this is the engine's own thread and would block, or no asyncio event loop is
                running here; the job was cancelled.
        """
        try:
            check_loop()
            await self._attend()
        except (GeneratorExit, UsageError):  # nothing can be awaited here
            self.cancel()
            raise
        except BaseException:
            await self.abort()
            raise
        return self.future.result()

    def result(self) -> T:
        """Return the job's result, as `wait`, for callers without a loop."""
        return run_blocking(self.wait())

    async def abort(self) -> None:
        """Cancel the job and wait for its end, through repeated cancellations.

        A signal handler's exception, such as a second Ctrl-C, abandons the clean-up.

        Raises:
            UsageError: this is the engine's own thread and would block; the job was cancelled.
        """
        self.cancel()
        if self._engine.abandoned:
            return
        try:
            if blocks_here():
                await self._attend()
            while not self.future.done():
                # A single task: each cancelled wait leaves a callback on the outcome, and an anyio
                # cancel scope cancels once per loop iteration.
                attending = asyncio.create_task(self._attend())
                await finished(attending)
                if not attending.cancelled():
                    attending.result()
        except (GeneratorExit, UsageError):  # nothing can be awaited here
            raise
        except BaseException:
            self._engine.abandoned = True
            raise

    async def _attend(self) -> None:
        """Wait for the end of the job and run its calls in this thread.

        Raises:
            UsageError: this is the engine's own thread and would block.
        """
        if blocks_here():
            self.refuse_own_thread()
        caller = self.caller
        if caller is not None:
            while not self.future.done():
                await ended(caller.wake)
                caller.serve()
        await ended(self.future)

    def refuse_fork(self) -> None:
        """Raise `ClosedError` in a forked child, where an unfinished job never ends."""
        if self.forked and not self.done():
            self._engine.check()

    def refuse_own_thread(self) -> None:
        """Raise `UsageError` on the engine's own thread if the job has not ended."""
        if self._engine.runs_here and not self.done():
            raise _own_thread()

    def _cancel(self) -> None:
        self.cancelled = True
        if self._task is not None:
            self._task.cancel()
        elif not self.done():  # a signal handler's exception came before it was posted
            self.future.set_exception(asyncio.CancelledError())
            self._engine._forget(self.future)

    def _start(self, function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        # Not a method of the job: a cycle of job and future would keep a restored state alive until
        # the garbage collector runs.
        self.future.add_done_callback(self._engine._forget)
        try:
            self._task = asyncio.get_running_loop().create_task(function())
        except Exception as error:
            self.future.set_exception(raisable(error))
            return
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None  # it holds the caller's context variables
        if self.future.done():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.future.set_result(task.result())
            return
        engine = self._engine
        if not self.cancelled and (
            isinstance(error, asyncio.CancelledError)
            or (isinstance(error, SaveAbortedError) and (engine.closed or engine._died))
        ):
            # The job was not cancelled: the engine ended while it ran.
            cause, error = error, engine.end_error()
            error.__cause__ = cause
        self.future.set_exception(error)


class Engine:
    """A daemon thread with an event loop (uvloop's if installed), started at first use.

    Attributes:
        owner: owner of the engine, as errors name it.
        closed: whether `close` was called.
        abandoned: whether a second interrupt ended a wait for clean-up.
        drain_deadline_s: limit of the wait for saves in flight at process exit, in seconds.
    """

    def __init__(self, name: str = "asyncckpt") -> None:
        self._name = name
        self.owner = "this Checkpointer"
        self._pid = os.getpid()
        # Reentrant: the garbage collector may close an engine inside any call of this thread.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: Outcome[None] = Outcome()
        self._jobs: dict[Future[Any], Job[Any]] = {}  # unfinished jobs
        self.closed = False
        self._died = False
        self._in_teardown = False
        self.abandoned = False
        self.drain_deadline_s = 0.0
        self.io = Workers(IO_THREADS, f"{name}-io")
        self.compute = Workers(min(COMPUTE_THREADS_MAX, os.cpu_count() or 1), f"{name}-compute")
        _register_exit_hook()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._thread else "not started"
        return f"Engine({self._name!r}, {state}, {len(self._jobs)} jobs)"

    @property
    def forked(self) -> bool:
        """Whether this process was forked after the engine was created."""
        return os.getpid() != self._pid

    @property
    def usable(self) -> bool:
        """Whether the engine was started and still accepts and finishes jobs."""
        ended = self.closed or self._died or self.abandoned or self.forked or exiting()
        return self._thread is not None and not ended

    @property
    def runs_here(self) -> bool:
        """Whether this is the engine's own thread, which runs callbacks."""
        return getattr(_here, "engine", None) is self

    def submit(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        at_end: Callable[[Future[Any]], object] | None = None,
        *,
        aborts: bool = False,
    ) -> Job[T]:
        """Run the coroutine that `function` returns on the engine's loop. From any thread.

        `at_end` is called on the engine with the job's future once it is resolved, maybe before
        this returns. With `aborts`, the job ends before an exception leaves the blocking call that
        begins it.

        Raises:
            ClosedError: the engine was closed, or this is a forked child.
            EngineDiedError: the engine's thread has ended.
            ResourceError: no thread can be started, or the interpreter is exiting.
        """
        self.check()  # before the lock, which may be held for ever in a forked child
        job: Job[T] = Job(self, at_end)
        with self._lock:
            self.check()
            self._start_locked()
            self.check()  # a signal handler may have closed it meanwhile
            assert self._loop is not None
            if aborts:
                abort_with_call(job)
            self._jobs[job.future] = job
            self._loop.call_soon_threadsafe(job._start, function)
        return job

    def _forget(self, future: Future[Any]) -> None:
        job = self._jobs.pop(future, None)
        if job is None:
            return
        if job.caller is not None:
            job.caller.poke()
        if job._at_end is not None:
            job._at_end(future)

    def post(self, call: Callable[[], None]) -> None:
        """Call a function on the engine's loop soon; do nothing once the loop has ended."""
        if self.forked:  # the loop is not here, and the lock may be held for ever
            return
        with self._lock:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call)

    def check(self) -> None:
        """Check that the engine may be used from here.

        Raises:
            ClosedError: the engine was closed, or this is a forked child.
            EngineDiedError: the engine's thread has ended.
            ResourceError: the interpreter is exiting, and this is not the engine's own thread.
        """
        if self.forked:
            raise ClosedError(
                f"{self._name} was created before this process was forked; its threads do not "
                "exist here. Create a new Checkpointer in the child"
            )
        # At exit, saves in flight are finished first; the engine's own thread may submit for them.
        if exiting() and not self.runs_here:
            raise ResourceError(
                f"{self._name}: the interpreter is exiting, and the library's threads end with it; "
                "save before the main thread ends: not in an atexit handler, in __del__, or in a "
                "thread that outlives the main thread"
            )
        if self._died:
            raise EngineDiedError(f"{self._name}: its thread has ended; create a new Checkpointer")
        if self.closed:
            raise ClosedError(f"{self.owner} is closed; create a new Checkpointer")

    def end_error(self) -> AsyncCheckpointError:
        """Return the error of a job that was unfinished when the engine ended."""
        if self._died:
            return EngineDiedError(
                f"{self._name}: the engine ended while this was outstanding; what was committed "
                "stays, the rest was aborted. Create a new Checkpointer"
            )
        return ClosedError(
            f"{self._name} was closed while this was outstanding; it was aborted. Await it before "
            "close()"
        )

    def begin_close(self) -> Outcome[None]:
        """Refuse new jobs and cancel running ones; the outcome resolves when all have ended."""
        with self._lock:
            first = not self.closed
            self.closed = True
            if self._loop is None:
                if first:
                    self._ended.set_result(None)
            elif first and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)
        return self._ended

    def close(self) -> None:
        """End all threads that were not abandoned. Idempotent. Blocking.

        Raises:
            UsageError: this is the engine's own thread; nothing was closed.
        """
        if self.forked:
            return
        if self.runs_here:
            raise _own_thread()
        ended = self.begin_close()
        if not self.abandoned and not sys.is_finalizing():  # then no other thread runs
            ended.result()
            if self._thread is not None:
                self._thread.join()  # its last act resolved `_ended`

    async def aclose(self) -> None:
        """End all threads. Idempotent.

        Cancellation: waits for the end, then raises.
        """
        if blocks_here() or self.forked:  # in a forked child, no thread would end the wait
            self.close()
            return
        waiter = asyncio.wrap_future(self.begin_close())
        cancellation: asyncio.CancelledError | None = None
        # The thread's last act resolves the future. It ends within microseconds, but joining it
        # would block.
        while not waiter.done() or (self._thread is not None and self._thread.is_alive()):
            try:
                await asyncio.wait((waiter,))  # a loop iteration if it is done
            except asyncio.CancelledError as error:
                cancellation = cancellation or error
        try:
            if cancellation is not None:
                raise cancellation
        finally:
            del cancellation  # breaks the reference cycle of error, traceback and frame

    def _start_locked(self) -> None:
        """Start the thread unless it is running."""
        if self._thread is not None:
            return
        loop = thread = None
        _live.add(self)
        try:
            # A uvloop loop keeps the context variables of its creation.
            loop = contextvars.Context().run(_new_loop)
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            thread.start()
            # Otherwise a signal handler has started one, or closed the engine.
            if self._thread is None and not self.closed:
                self._loop, self._thread = loop, thread
        except BaseException as error:
            if loop is not None:
                loop.close()
            # `Thread.start` replaces a signal handler's exception by such errors of its own.
            if error.args in ((thread,), ("release unlocked lock",)) and error.__context__:
                raise error.__context__ from None
            if not isinstance(error, (RuntimeError, OSError)) or isinstance(error, TimeoutError):
                raise  # a signal handler's
            self.check()  # knows by now whether the interpreter is exiting
            raise thread_error(self._name, error) from error

    def _stop(self) -> None:
        if not self._in_teardown:  # close() must not stop the clean-up after a death
            asyncio.get_running_loop().stop()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:  # `submit` holds it until it has assigned the loop or failed
            if self._loop is not loop:
                loop.close()
                return
        asyncio.set_event_loop(loop)
        _here.engine = self
        try:
            loop.run_forever()
        except BaseException:
            logger.exception("%s: the engine's loop failed", self._name)
        finally:
            self._in_teardown = True
            with self._lock:
                self._died = not self.closed
            try:
                tasks = asyncio.all_tasks(loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    # Each ends within this time unless it waits for an abandoned thread.
                    limit_s = CLEANUP_S + 2 * ABANDON_S
                    loop.run_until_complete(asyncio.wait(tasks, timeout=limit_s))
                for task in tasks:
                    if task.done():
                        seen(task)
                self.io.shutdown()
                self.compute.shutdown()
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                with self._lock:
                    loop.close()
                for job in tuple(self._jobs.values()):
                    if not job.future.done():
                        job.future.set_exception(self.end_error())
                    self._forget(job.future)  # an unstarted job has no callback for this
                self._ended.set_result(None)

    def drain(self, exit_s: float) -> None:
        """Wait for saves in flight, until `drain_deadline_s` after `exit_s` (`time.monotonic`).

        Unfinished saves are then aborted; threads stuck in a system call end with the process.
        """
        if self.forked or self._thread is None:
            return
        given_up = self.closed or self.abandoned
        with self._lock:
            jobs = () if given_up else tuple(self._jobs.values())
        pending = [job.future for job in jobs if job.drained and not job.done()]
        if pending:
            warn(
                f"{self._name}: the process ends without close(); waiting up to "
                f"{self.drain_deadline_s:g} s for {len(pending)} save(s) in flight"
            )
        end = exit_s + (0.0 if given_up else self.drain_deadline_s)
        for future in pending:
            try:
                future.exception(timeout=max(0.0, end - time.monotonic()))
            except TimeoutError:
                warn(
                    f"{self._name}: a save was abandoned: it did not finish within "
                    f"{self.drain_deadline_s:g} s of the process's end"
                )
        # Also for an abandoned engine: at exit, the interpreter unwinds threads that return from
        # compiled code, and C++ code such as NumPy's then aborts the process.
        left_s = max(EXIT_CLEANUP_S, end - time.monotonic())
        with contextlib.suppress(TimeoutError):
            self.begin_close().result(left_s)


def warn(message: str, level: int = logging.WARNING) -> None:
    """Log the message and issue a warning, because logging may not be configured.

    Raises nothing, even if warnings are errors: an exit hook or `__del__` has no caller to handle
    an error.
    """
    logger.log(level, message)
    with contextlib.suppress(Exception):
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except Exception:
            if sys.stderr is not None:
                print(f"RuntimeWarning: {message}", file=sys.stderr)


_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_last_calls: list[Callable[[], None]] = []
_hook_registered = False
_exit_begun = False

_here = threading.local()
"""Its `engine` is the engine that owns this thread."""


def _own_thread() -> UsageError:
    return UsageError(
        "called on the library's own thread (by progress=, or by the policy of keep=): it would "
        "wait for itself; leave it to a thread of your own"
    )


def wait_quietly(future: Outcome[Any], timeout_s: float | None = None) -> bool:
    """Wait up to `timeout_s` seconds and return whether the future is done; ignore its outcome.

    Raises:
        UsageError: this thread belongs to the engine that runs the job.
    """
    engine = getattr(_here, "engine", None)
    if engine is not None and future in engine._jobs:
        raise _own_thread()
    return future.wait(timeout_s)


async def ended(future: Outcome[Any]) -> None:
    """Wait until a future is done; ignore its outcome. Cancellation: only stops the waiting."""
    if blocks_here():
        wait_quietly(future)
        return
    waiter = asyncio.wrap_future(future)
    waiter.add_done_callback(seen)  # even if this wait ends first
    try:
        await asyncio.wait((waiter,))
    except asyncio.CancelledError:
        waiter.cancel()  # detaches the waiter; only the job resolves the future
        raise


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop

        # If a standard stream is closed, uvloop gets its number, and libuv aborts the process when
        # it closes a descriptor below 3. (test_a_closed_standard_stream_aborts_nothing)
        for standard_stream in range(3):
            os.fstat(standard_stream)
    except (ImportError, OSError):
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _register_exit_hook() -> None:
    # atexit handlers run after concurrent.futures has shut down its executors and non-daemon
    # threads were joined; threading's own hooks run before both.
    global _hook_registered, _exit_begun
    if _hook_registered:
        return
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_drain_all)
        _hook_registered = True
    except RuntimeError:  # threading's own hooks have been called
        _exit_begun = True


def _drain_all() -> None:
    global _exit_begun
    _exit_begun = True
    exit_s = time.monotonic()  # all engines drain at the same time
    try:
        for engine in tuple(_live):
            try:
                engine.drain(exit_s)
            except Exception as error:  # the other engines' saves must still be drained
                warn(f"{engine!r} could not be ended: {error!r}")
    finally:  # also after Ctrl-C
        for call in _last_calls:
            call()


def exiting() -> bool:
    """Return whether the interpreter has begun to exit, so that a new job might never end."""
    # The main thread counts as ended as soon as the interpreter waits for the other threads. It
    # must not ask that itself: CPython 3.11 ends it if a signal handler raises in `is_alive`.
    main = threading.main_thread()
    return _exit_begun or not (main is threading.current_thread() or main.is_alive())


def call_at_exit(call: Callable[[], None]) -> None:
    """Register a call for process exit, made after all engines have ended if one was used."""
    _last_calls.append(call)
