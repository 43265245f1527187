"""The messages between processes, whose shapes are those of the protocol's version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.coordinators.directory import DirectoryCoordinator
from asyncckpt.version import PROTOCOL
from tests.session.together.job import Job, state

# If a message changes, one of "bytes" included, raise `PROTOCOL`: processes of different releases
# would misunderstand each other. Then update this list.
MESSAGES = (
    3,
    """
bye/n: bytes
call/n/matched.0/n: bytes
call/n/name/n: bytes
call/n/outcome: bytes
call/n/read: bytes
call/n/restored/n: [[int | str]]
call/n/result.0: bytes
call/n/step: [int | {atomic: bool, broadcast: str, step: NoneType}]
n/hello/n: {count: int, host: str, nonce: str, pid: int, run: str, version: str}
n/hosts/n: [[int | str]]
n/welcome/n: {nonces: [str], refusal: NoneType, run: str, state: str}
save/n/known/n: bytes
save/n/name/n: bytes
save/n/outcome: bytes
save/n/plan/n: [[NoneType | int] | bool | str]
save/n/planned: {kept: bool, known: bool, limits: [NoneType | int], may_differ: bool, merge: bool}
save/n/ready/n: bytes
""",
)


def shape(value: Any) -> str:
    """Describe the types of a JSON document."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shape(value[name])}' for name in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{' | '.join(sorted(set(map(shape, value))))}]"
    return type(value).__name__


def test_messages_change_only_with_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    put = DirectoryCoordinator.put

    async def listening(self: DirectoryCoordinator, key: str, value: bytes) -> None:
        name = re.sub(r"/\d+(?=/|$)", "/n", re.sub(r"(^|/)[0-9a-f]{16,}", "", key))
        try:
            text = shape(json.loads(value))
        except ValueError:
            text = "bytes"
        # What a beat contains depends on when it is sent.
        if "/beat/" not in name:
            found.add(f"{name.removeprefix('asyncckpt/')}: {text}\n")
        await put(self, key, value)

    async def part(ckpt: asyncckpt.Checkpointer, process: int) -> None:
        tree = state()
        for step in range(2):
            await ckpt.save(step, tree)
        assert await ckpt.steps() == [0, 1]
        await ckpt.restore(like=tree)
        await ckpt.delete(0)
        with pytest.raises(asyncckpt.MismatchError):
            await ckpt.save(2, tree if process else tree | {"step": 2.5})

    monkeypatch.setattr(DirectoryCoordinator, "put", listening)
    assert Job(tmp_path, 2).play(part) == [None, None]
    assert (PROTOCOL, "\n" + "".join(sorted(found))) == MESSAGES
