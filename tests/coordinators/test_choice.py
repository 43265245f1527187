"""The choice of a coordinator, from loaded modules, without starting anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.arguments import check_coordinator
from asyncckpt.coordinators import choice
from asyncckpt.coordinators.choice import Place, SingleProcess, choose
from asyncckpt.coordinators.directory import DirectoryCoordinator
from asyncckpt.coordinators.jax import JaxCoordinator
from asyncckpt.coordinators.torch import TorchCoordinator
from asyncckpt.errors import UsageError
from tests import children
from tests.coordinators.members import Member, members


def test_one_process_works_alone() -> None:
    assert isinstance(choose("single"), SingleProcess)
    assert isinstance(choose("auto"), SingleProcess)


def test_a_coordinator_is_taken_as_it_is(tmp_path: Path) -> None:
    for given in (
        members(3)[1],
        DirectoryCoordinator(tmp_path, process_index=1, process_count=2),
    ):
        assert choose(given) is given


def test_choosing_imports_nothing_and_starts_no_backend() -> None:
    out = children.output(
        """
        import sys
        from asyncckpt.coordinators.choice import choose
        print(choose("auto"))
        print(sorted({"jax", "torch", "tensorstore"} & set(sys.modules)))
        import jax, torch
        from jax._src import xla_bridge
        print(choose("auto"), xla_bridge.backends_are_initialized())
        """
    )
    assert out.splitlines() == ["SingleProcess()", "[]", "SingleProcess() False"]


def runtimes(patch: pytest.MonkeyPatch, jax: Place | None, torch: Place | None) -> None:
    patch.setattr(choice, "_jax_processes", lambda: jax)
    patch.setattr(choice, "_torch_processes", lambda: torch)
    patch.setattr("asyncckpt.coordinators.jax.JaxCoordinator", lambda: "jax")
    patch.setattr("asyncckpt.coordinators.torch.TorchCoordinator", lambda: "torch")


def test_of_two_runtimes_that_agree_jax_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes(monkeypatch, (1, 4), (1, 4))
    assert choose("auto") == "jax"
    runtimes(monkeypatch, None, (1, 4))
    assert choose("auto") == "torch"


@pytest.mark.parametrize("torch", [(2, 4), (1, 8)])
def test_two_runtimes_that_disagree_are_refused(
    monkeypatch: pytest.MonkeyPatch, torch: Place
) -> None:
    runtimes(monkeypatch, (1, 4), torch)
    with pytest.raises(
        UsageError, match=r"jax\.distributed says that this is process 1 of 4, "
    ) as e:
        choose("auto")
    assert f"torch.distributed says process {torch[0]} of {torch[1]}" in str(e.value)
    assert isinstance(choose("single"), SingleProcess)


def test_a_world_without_a_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(
        UsageError, match=r"WORLD_SIZE=8, but neither .* has been initialised: call"
    ):
        choose("auto")
    assert isinstance(choose("single"), SingleProcess)
    for alone in ("1", "", "several"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        assert isinstance(choose("auto"), SingleProcess)


def test_several_jax_processes_without_a_coordinator_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncckpt.coordinators.jax.jax.process_count", lambda: 4)
    monkeypatch.setattr(
        "asyncckpt.coordinators.jax.xla_bridge.backends_are_initialized", lambda: True
    )
    with pytest.raises(UsageError, match=r"JAX runs on 4 processes, but jax\.distributed has not"):
        choose("auto")


def test_jax_is_not_asked_for_its_processes_before_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked() -> int:
        raise AssertionError("this breaks a later jax.distributed.initialize")

    monkeypatch.setattr("asyncckpt.coordinators.jax.jax.process_count", asked)
    monkeypatch.setattr(
        "asyncckpt.coordinators.jax.xla_bridge.backends_are_initialized", lambda: False
    )
    assert isinstance(choose("auto"), SingleProcess)


def test_a_runtime_that_is_not_initialised_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"call jax\.distributed\.initialize"):
        JaxCoordinator()
    with pytest.raises(UsageError, match=r"call torch\.distributed\.init_process_group"):
        TorchCoordinator()


def test_a_client_without_them_is_refused_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(client=object(), process_id=0, num_processes=2)
    monkeypatch.setattr("asyncckpt.coordinators.jax.distributed.global_state", state)
    with pytest.raises(UsageError, match=r"jax \d.*has no key_value_delete, "):
        JaxCoordinator()


@pytest.mark.parametrize("odd", ["jax", "", None, 5, object(), Member])
def test_what_is_no_coordinator_is_refused(odd: object) -> None:
    with pytest.raises(UsageError, match='pass "auto", "single", or a coordinator such as'):
        check_coordinator(odd)


def test_a_missing_method_is_named() -> None:
    given: Any = members(2)[0]
    given.put_once = None
    with pytest.raises(UsageError, match="it has no method put_once"):
        check_coordinator(given)


@pytest.mark.parametrize(
    "place", [(2, 2), (-1, 2), (0, 0), ("0", 2), (True, 2), (0, None), (0.0, 1)]
)
def test_a_wrong_place_is_refused(tmp_path: Path, place: tuple[Any, Any]) -> None:
    index, count = place
    with pytest.raises(UsageError, match=r"process_index=.* of process_count="):
        DirectoryCoordinator(tmp_path, process_index=index, process_count=count)
    given: Any = members(1)[0]
    given.process_index, given.process_count = place
    with pytest.raises(UsageError, match=r"process_index=.* of process_count="):
        check_coordinator(given)
