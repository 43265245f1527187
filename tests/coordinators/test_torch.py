"""The torch coordinator's directories of keys, on every kind of store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from asyncckpt.coordinators.torch import EMPTY, MULTI_GET_MIN, TorchService, server_of
from tests import children

STORES: dict[str, Callable[[Path], Any]] = {
    "tcp": lambda place: TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20)),
    "hash": lambda place: HashStore(),
    "file": lambda place: FileStore(str(place / "store"), 1),
}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return PrefixStore("default_pg", STORES[request.param](tmp_path))


def test_errors_name_the_process_that_serves_the_keys(store: Any) -> None:
    tcp = store.underlying_store
    server = f"process 0 (127.0.0.1:{tcp.port})" if isinstance(tcp, TCPStore) else ""
    assert server_of(store) == server_of(PrefixStore("more", store)) == server


def test_the_agent_of_torchrun_serves_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20))
    assert server_of(store) == f"the agent of torchrun (127.0.0.1:{store.port})"


def test_every_kind_of_store_will_do(store: Any) -> None:
    service = TorchService(store)
    assert service.look("asyncckpt/a/b") is None
    assert service.list("asyncckpt") == {}
    service.put("asyncckpt/a/b", b"\0\xff")
    assert service.put_once("asyncckpt/a/b", b"x") == b"\0\xff"
    assert service.put_once("asyncckpt/a/c", b"c") == b"c"
    assert service.list("asyncckpt") == {"a/b": b"\0\xff", "a/c": b"c"}
    service.delete("asyncckpt/a")
    assert service.list("asyncckpt") == {}
    assert service.look("asyncckpt/a/b") is None


def test_the_trainers_keys_are_not_touched(store: Any) -> None:
    store.set("asyncckpt-like", b"x")
    store.set("mine", b"x")
    service = TorchService(store)
    service.put("asyncckpt/a", b"x")
    service.delete("asyncckpt")
    assert store.check(["asyncckpt-like", "mine"])


def test_a_directory_does_not_grow_with_values_that_are_replaced(store: Any) -> None:
    service = TorchService(store)
    for turn in range(5):
        service.put("asyncckpt/run/beat/1", b"%d" % turn)
        service.put_once("asyncckpt/run/beat/1", b"x")
    assert service.look("asyncckpt/run/beat/") == b"1\n"
    assert service.look("asyncckpt/run/") == b"beat/\n"
    for attempt in range(5):
        service.put(f"asyncckpt/run/{attempt}/ready", b"x")
        service.delete(f"asyncckpt/run/{attempt}")
    assert service.look("asyncckpt/run/") == b"beat/\n"
    service.delete("asyncckpt/run")
    assert service.look("asyncckpt/") == EMPTY


@pytest.mark.parametrize("count", [1, MULTI_GET_MIN - 1, MULTI_GET_MIN, 200])
def test_a_name_without_its_key_is_not_listed(count: int) -> None:
    """Its process has been between both, or another deletes the keys."""
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20))
    service = TorchService(store)
    for number in range(count):
        service.put(f"a/{number}", b"%d" % number)
    store.append("a/", "coming\n")
    expected = {str(number): b"%d" % number for number in range(count)}
    assert service.list("a") == expected
    store.delete_key("a/0")
    del expected["0"]
    assert service.list("a") == expected


def test_keys_set_at_the_same_time_are_all_listed(store: Any) -> None:
    clones = [TorchService(store) for _ in range(4)]
    together = threading.Barrier(len(clones))

    def fill(number: int) -> None:
        together.wait()
        for turn in range(20):
            clones[number].put(f"asyncckpt/a/{turn}/{number}", b"x")

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(len(clones))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {f"{turn}/{number}" for turn in range(20) for number in range(len(clones))}
    assert set(clones[0].list("asyncckpt/a")) == expected
    clones[1].delete("asyncckpt")
    assert clones[2].list("asyncckpt") == {}


def test_the_trainers_connection_is_not_used() -> None:
    """A clone has a separate connection; its time limits do not affect others."""
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20))
    held = threading.Thread(target=lambda: store.get("later"))
    held.start()
    service = TorchService(store)
    service.put("asyncckpt/a", b"x")
    assert service.look("asyncckpt/a") == b"x"
    # The trainer's own `get` still waits; only another connection can end it.
    assert held.is_alive()
    store.clone().set("later", b"x")
    held.join(10)
    assert not held.is_alive()


def test_a_process_ends_well_whose_thread_makes_calls_to_the_end() -> None:
    out = children.output(
        """
        import threading
        import torch.distributed
        from asyncckpt.coordinators.torch import TorchCoordinator
        from asyncckpt.flow.engine import Engine

        server = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
        torch.distributed.init_process_group("gloo", store=server, rank=0, world_size=1)
        coordinator = TorchCoordinator()

        async def connect():
            await coordinator.look("key")

        engine = Engine()
        engine.submit(connect).result()
        caller = coordinator._caller
        begun = threading.Event()
        def calls():
            while True:  # as if answers came late: the thread is always in a call
                if len(caller._calls) < 100:
                    caller.submit(lambda service: service.look("key"))
                else:
                    begun.set()
        threading.Thread(target=calls, daemon=True).start()
        begun.wait()
        print("exits", flush=True)
        """
    )
    assert out == "exits\n"


def test_values_deleted_while_they_are_read_delay_a_list_only_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the last of many processes that end at the same time; the others wait for minutes."""
    monkeypatch.setattr("asyncckpt.coordinators.torch.MULTI_GET_S", 0.05)
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=600))
    service = TorchService(store)
    for number in range(MULTI_GET_MIN):
        service.put(f"a/{number}", b"%d" % number)
    real = service._store

    class Deleting:
        def check(self, keys: list[str]) -> bool:
            found: bool = real.check(keys)
            real.delete_key("a/0")
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    service._store = Deleting()
    assert set(service.list("a")) == {str(number) for number in range(1, MULTI_GET_MIN)}
    assert service.look("a/1") == b"1"
