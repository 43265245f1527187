"""The handshake: how the processes of a job become a group with a run id.

Each process posts a hello with a fresh nonce. Process 0 posts a welcome, which has the run id and
repeats the nonces it has seen; a process believes a welcome only if its own nonce is in it. It
acknowledges with another hello, and once all have done so, process 0 posts that they agree. Keys of
an earlier life of the job, which many services keep, thus never match.
"""

# Rule 1: every process but 0 polls one key, and process 0 one directory: its number of calls does
#   not grow with the number of processes (welcomes are pages of `PAGE` processes).
# Rule 2: process 0 alone decides whether all agree. It refuses in the same place, so that every
#   living process gets the same error.
# Rule 3: a hello may change until its process has acknowledged: what process 0 sees first may be
#   that of an earlier life. (test_a_restarted_process_does_not_believe_its_predecessor)

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.keys import PREFIX, pauses
from asyncckpt.coordinators.meeting import Hello, Meeting
from asyncckpt.coordinators.messages import decode_error, encode_error
from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.ports import Coordinator
from asyncckpt.version import VERSION

PAGE = 256
"""Processes in one welcome: nonce and host of each, in one message."""

HOST_LENGTH = 64
"""Characters kept of the name of a host; Linux allows no more."""

REFUSAL_S = 1.0
"""How much longer than `arrival_s` a process waits for process 0 to say who has not come."""

ANSWER_S = 10.0
"""How much longer a process waits that has acknowledged: process 0 lives, and came later."""

ROLL_CALL_S = 1.0
"""Shortly before its time is up, process 0 welcomes those that have come: the hellos of those that
do not acknowledge are of an earlier life."""

SETTLE_S = 0.5
"""When a hello has changed, its predecessor has this long to say that it is alive, too."""

LEAVE_S = 1.0
"""How long a process that fails or is cancelled may take to tell the others."""

REFUSAL_NBYTES = 32 << 10
"""Largest error in a welcome, beside the nonces."""


async def shake_hands(
    coordinator: Coordinator, *, root: str, opened: int, arrival_s: float
) -> Group:
    """Return the group of all processes of the coordinator, which have opened the same root.

    Args:
        coordinator: the processes.
        root: where they save; equal on all processes.
        opened: how many times this process has opened the root, this time included; equal on all
            processes. It keeps several groups on one root apart.
        arrival_s: how long to wait for the other processes.

    Raises:
        UsageError: a process has not come, has come twice, runs another release of this library, or
            has opened the root another number of times. Every process that is waiting gets it.
        StoreError: the coordinator's service failed.
    """
    hello = Hello(secrets.token_hex(8), socket.gethostname()[:HOST_LENGTH], os.getpid())
    place = f"{PREFIX}/{hashlib.sha256(root.encode(errors='surrogatepass')).hexdigest()[:32]}"
    meeting = Meeting(coordinator, place, root, opened, hello, arrival_s)
    if coordinator.process_count == 1:
        return meeting.group(secrets.token_hex(16), [hello.host])
    if coordinator.process_index == 0:
        return await _Host(meeting).gather()
    return await _Guest(meeting).arrive()


class _Host:
    """Process 0, which gathers the others."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._run_id = secrets.token_hex(16)
        self._hellos: dict[int, Hello] = {}
        self._settled = 0.0
        self._posted: dict[int, bytes] = {}

    async def gather(self) -> Group:
        """Return the group once all have acknowledged; refuse all that have come on an error."""
        try:
            await self._gather()
        except BaseException as error:
            with contextlib.suppress(AsyncCheckpointError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._post("refused", error)
            raise
        hosts = [self._hellos[process].host for process in range(self._meeting.count)]
        return self._meeting.group(self._run_id, hosts)

    async def _gather(self) -> None:
        meeting = self._meeting
        await meeting.say(replace(meeting.hello, run=self._run_id))
        for pause in pauses(meeting.count):
            met = await meeting.coordinator.list(meeting.prefix)
            self._read(met)
            self._check(met)
            waiting = [p for p in range(meeting.count) if not self._acknowledged(p)]
            now = time.monotonic()
            if not waiting and now >= self._settled:
                return await self._post("agreed")
            if len(self._hellos) == meeting.count or now >= meeting.end - ROLL_CALL_S:
                await self._post("welcome")
            if now >= meeting.end:
                raise await meeting.absent(waiting)
            await asyncio.sleep(pause)

    def _acknowledged(self, process: int) -> bool:
        return process in self._hellos and self._hellos[process].run == self._run_id

    def _read(self, met: Mapping[str, bytes]) -> None:
        before, self._hellos = self._hellos, {}
        for process in range(self._meeting.count):
            value = met.get(f"hello/{process}")
            if value is not None:
                hello = self._hellos[process] = Hello.decoded(value)
                if process in before and before[process].nonce != hello.nonce:
                    self._settled = time.monotonic() + SETTLE_S

    def _check(self, met: Mapping[str, bytes]) -> None:
        meeting = self._meeting
        for process, hello in self._hellos.items():
            if process == 0 and hello.nonce != meeting.hello.nonce:
                raise meeting.twice(0, str(meeting.hello), str(hello))
            # A complaint that names another nonce is of an earlier life.
            nonce, one, other = json.loads(met.get(f"twice/{process}", b'["", "", ""]'))
            if nonce == hello.nonce:
                raise meeting.twice(process, one, other)
            if hello.version != VERSION and self._acknowledged(process):
                raise UsageError(
                    f"process {process} ({hello}) runs asyncckpt {hello.version}, process 0 "
                    f"({meeting.hello}) runs {VERSION}: install the same release everywhere",
                    location=meeting.root,
                    expected=VERSION,
                    found=hello.version,
                )

    async def _post(self, state: str, error: BaseException | None = None) -> None:
        """Post the welcomes that have changed."""
        meeting = self._meeting
        refusal = None
        if error is not None:
            data = encode_error(
                error,
                process=0,
                host=meeting.hello.host,
                stage="handshake",
                limit_nbytes=REFUSAL_NBYTES,
            )
            refusal = json.loads(data)
        for page in range(-(-meeting.count // PAGE)):
            here = range(page * PAGE, min((page + 1) * PAGE, meeting.count))
            hellos = [self._hellos.get(process) for process in here]
            welcome = {
                "state": state,
                "run": self._run_id,
                "nonces": [hello.nonce if hello else "" for hello in hellos],
                "hosts": [hello.host if hello else "" for hello in hellos],
                "refusal": refusal,
            }
            value = json.dumps(welcome).encode()
            if self._posted.get(page) != value:
                self._posted[page] = value
                await meeting.coordinator.put(meeting.key("welcome", page), value)


class _Guest:
    """Any other process, which waits for its welcome."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._page, self._slot = divmod(meeting.index, PAGE)
        self._replaced = False

    async def arrive(self) -> Group:
        """Return the group once process 0 says that all agree."""
        meeting = self._meeting
        try:
            return await self._arrive()
        except BaseException:
            # An acknowledgement that stays behind would be taken for a process that goes on.
            if meeting.hello.run and not self._replaced:
                with contextlib.suppress(AsyncCheckpointError, TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await meeting.coordinator.delete(meeting.key("hello", meeting.index))
            raise

    async def _arrive(self) -> Group:
        meeting = self._meeting
        await meeting.say(meeting.hello)
        for pause in pauses(meeting.count):
            welcome = await self._welcome(self._page)
            if welcome is not None and echoes(welcome, self._slot, meeting.hello.nonce):
                if welcome["state"] == "refused":
                    raise decode_error(json.dumps(welcome["refusal"]).encode())
                if welcome["run"] != meeting.hello.run:
                    await meeting.say(replace(meeting.hello, run=welcome["run"]))
                elif welcome["state"] == "agreed":
                    return meeting.group(welcome["run"], await self._hosts())
            elif welcome is not None:
                await self._check_own()
            acknowledged = meeting.hello.run != ""
            grace_s = ANSWER_S if acknowledged else REFUSAL_S
            if time.monotonic() >= meeting.end + grace_s:
                raise await meeting.absent(() if acknowledged else (0,))
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    async def _welcome(self, page: int) -> dict[str, Any] | None:
        value = await self._meeting.coordinator.look(self._meeting.key("welcome", page))
        return None if value is None else json.loads(value)

    async def _hosts(self) -> list[str]:
        # All pages were posted, though perhaps not yet all as "agreed".
        pages = [await self._welcome(p) for p in range(-(-self._meeting.count // PAGE))]
        return [host for page in pages if page is not None for host in page["hosts"]]

    async def _check_own(self) -> None:
        """Raise if another process of this index has come, and tell process 0."""
        meeting = self._meeting
        value = await meeting.coordinator.look(meeting.key("hello", meeting.index))
        other = meeting.hello if value is None else Hello.decoded(value)
        if other.nonce != meeting.hello.nonce:
            self._replaced = True
            told = json.dumps((other.nonce, str(meeting.hello), str(other))).encode()
            await meeting.coordinator.put(meeting.key("twice", meeting.index), told)
            raise meeting.twice(meeting.index, str(meeting.hello), str(other))


def echoes(welcome: Mapping[str, Any], slot: int, nonce: str) -> bool:
    """Return whether a welcome answers the hello with this nonce, not one of an earlier life."""
    nonces: Sequence[str] = welcome["nonces"]
    return slot < len(nonces) and nonces[slot] == nonce
