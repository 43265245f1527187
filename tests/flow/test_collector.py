"""The pause of the garbage collector, alone and where the caller's thread makes many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.adapters.torch import TorchAdapter
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.flow import collector
from asyncckpt.flow.collector import without_collections
from asyncckpt.options import RestoreOptions
from asyncckpt.restore.request import restore_request
from asyncckpt.save.snapshot import take_snapshot
from tests import children


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_runs_again_after_the_block_and_after_an_error() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collections():
        raise KeyError
    assert gc.isenabled()


def test_a_child_forked_while_another_thread_is_in_a_block_has_its_collector() -> None:
    out = children.output(
        """
        import gc, os, threading
        from asyncckpt.flow.collector import without_collections

        entered, leave = threading.Event(), threading.Event()

        def other():
            with without_collections():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        child = os.fork()
        if child == 0:
            enabled = gc.isenabled()
            with without_collections():
                paused = not gc.isenabled()
            os._exit(0 if enabled and paused and gc.isenabled() else 1)
        leave.set()
        thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled())
        """
    )
    assert out == "0 True\n"


def test_a_collector_that_the_caller_has_stopped_stays_stopped() -> None:
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


def test_blocks_of_two_threads_may_overlap() -> None:
    one, other = without_collections(), without_collections()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.parametrize("call", ["isenabled", "disable", "enable"])
def test_a_signal_handler_may_use_a_block_anywhere_in_another(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each call that the outer block makes."""
    handled = 0

    def handler() -> None:
        nonlocal handled
        handled += 1
        monkeypatch.setattr(collector, "gc", gc)
        with without_collections():
            pass

    for before in (True, False):

        def interrupted(before: bool = before) -> Any:
            if before:
                handler()
            result = getattr(gc, call)()
            if not before:
                handler()
            return result

        names = ("isenabled", "disable", "enable")
        calls = {name: getattr(gc, name) for name in names} | {call: interrupted}
        monkeypatch.setattr(collector, "gc", SimpleNamespace(**calls))
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled()
    assert handled == 2


@pytest.mark.parametrize("call", ["isenabled", "disable"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("enabled_before", [True, False])
def test_a_signal_handler_that_raises_during_the_entry_leaves_the_collector_as_it_was(
    call: str, before: bool, enabled_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> Any:
        if not before:
            getattr(gc, call)()
        raise KeyboardInterrupt

    with without_collections():
        pass
    if not enabled_before:
        gc.disable()
    names = ("isenabled", "disable", "enable")
    calls = {name: getattr(gc, name) for name in names} | {call: interrupted}
    monkeypatch.setattr(collector, "gc", SimpleNamespace(**calls))
    with pytest.raises(KeyboardInterrupt), without_collections():
        pass
    monkeypatch.undo()
    assert gc.isenabled() == enabled_before
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled_before


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether the collector was enabled when a tensor was opened, as a source or as a target."""
    found: set[bool] = set()
    for name in ("source", "target"):
        method = getattr(TorchAdapter, name)

        def noted(*given: Any, method: Any = method, **more: Any) -> Any:
            found.add(gc.isenabled())
            return method(*given, **more)

        monkeypatch.setattr(TorchAdapter, name, noted)
    return found


def test_leaves_of_a_save_and_targets_of_a_restore_are_opened_without_collections(
    seen: set[bool],
) -> None:
    tree = {"a": torch.ones(3), "b": np.ones(3), "n": 1}
    take_snapshot(tree)
    assert seen == {False} and gc.isenabled()
    seen.clear()
    restore_request(
        "into",
        tree,
        leaves="numpy",
        include=None,
        strict=True,
        cast=False,
        options=RestoreOptions(),
        progress=None,
    )
    assert seen == {False} and gc.isenabled()


def test_leaves_that_cannot_be_saved_leave_the_collector_as_it_was(seen: set[bool]) -> None:
    with pytest.raises(UnsupportedLeafError, match="layout"):
        take_snapshot({"a": torch.ones(3).to_sparse()})
    assert seen == {False} and gc.isenabled()
