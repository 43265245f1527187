"""The handshake by which the processes of a job become a group with a run id.

Each process posts a hello with a fresh nonce. Process 0 posts a welcome with the run id and the
nonces it has seen; a process trusts a welcome only if its own nonce is in it. It acknowledges by
posting its hello again with the run id, and once all have done so, process 0 posts that they agree.
So keys of an earlier life of the job, which many services keep, never match.
"""

# Rule 1: process 0 polls one directory, every other process one key. The number of calls does not
#   grow with the number of processes (a welcome is for `PAGE` processes).
# Rule 2: process 0 alone decides whether all agree. It posts a refusal under the same key, so that
#   every living process gets the same error.
# Rule 3: a hello without an acknowledgement may be of an earlier life, and proves nothing.
#   (test_process_0_does_not_believe_the_predecessors_of_others)
# Rule 4: each hello has its own key. If two processes have the same index, both acknowledge.
#   (test_a_process_that_comes_twice_is_an_error_for_all)

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.key_values import pauses
from asyncckpt.coordinators.meeting import RELEASE, Hello, Meeting
from asyncckpt.coordinators.messages import decode_error, encode_error
from asyncckpt.coordinators.rounds import briefly
from asyncckpt.errors import UsageError
from asyncckpt.ports import Coordinator

PAGE = 256
"""Processes per welcome: a message holds their nonces of ten earlier lives of the job."""

RUNS = 512
"""Most pairs of a host and its number of successive processes per message."""

REFUSAL_S = 1.0
"""How much longer than `arrival_s` processes wait for process 0 to name the missing processes."""

ANSWER_S = 10.0
"""How much longer a process waits after acknowledging: process 0 is alive, but arrived later."""

ROLL_CALL_S = 1.0
"""How long before its deadline process 0 welcomes the processes that have come. Those that do not
acknowledge then are of an earlier life."""

SETTLE_S = 0.5
"""How long process 0 waits for further acknowledgements if a process has several hellos."""

LEAVE_S = 0.5
"""How long a process that fails or is cancelled may take to notify the others."""

REFUSAL_NBYTES = 32 << 10
"""Largest encoded error in a welcome, which also holds the nonces."""


async def shake_hands(
    coordinator: Coordinator, *, root: str, opened: int, arrival_s: float
) -> Group:
    """Return the group of all processes of the coordinator, once all have opened this root.

    Args:
        coordinator: the processes.
        root: path or URL of the run, equal on all processes.
        opened: how often this process has opened the root, including this time; equal on all
            processes. It distinguishes several groups on one root.
        arrival_s: seconds to wait for the other processes.

    Raises:
        UsageError: a process is missing, runs twice or with another release of this library,
            expects another number of processes, or has opened the root more or fewer times. Every
            waiting process gets the error.
        StoreError: the coordinator's service failed.
    """
    if coordinator.process_index == 0:
        return await _Host(coordinator, root, opened, arrival_s).gather()
    return await _join(Meeting(coordinator, root, opened, arrival_s))


class _Host(Meeting):
    """Process 0, which gathers the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run_id = secrets.token_hex(16)
        self._hellos: dict[int, list[Hello]] = {}
        self._posted: dict[int, bytes] = {}

    async def gather(self) -> Group:
        """Return the group once all have acknowledged; on an error, refuse all of them."""
        try:
            hosts = await self._gather()
        except BaseException as error:
            await briefly(self._refuse(error), limit_s=LEAVE_S)
            raise
        return await self.group(self._run_id, hosts)

    async def _refuse(self, error: BaseException) -> None:
        data = encode_error(
            error, process=0, host=self.hello.host, stage="handshake", limit_nbytes=REFUSAL_NBYTES
        )
        await self._post("refused", json.loads(data))
        # A second process 0 sees this change, and learns that it is not the only one.
        await self.say(replace(self.hello, run=""))

    async def _gather(self) -> list[str]:
        """Return the hosts of all processes once all have acknowledged."""
        posted = await self.coordinator.list(self.key("hello", 0))
        before = list(map(Hello.decoded, posted.values()))
        await self.say(replace(self.hello, run=self._run_id))
        settled = 0.0
        for pause in pauses(self.count):
            met = await self.coordinator.list(self.key("hello"))
            self._hellos = _hellos(met)
            self._check(before)
            now = time.monotonic()
            waiting = [p for p in range(self.count) if not self._live(p)]
            if waiting:
                several = any(len(hellos) > 1 for hellos in self._hellos.values())
                settled = now + (SETTLE_S if several else 0.0)
            elif now >= settled:
                hosts = [self._live(process)[0].host for process in range(self.count)]
                await self._post_hosts(hosts)
                await self._post("agreed")
                return hosts
            if self._all_met() or now >= self.end - ROLL_CALL_S:
                await self._post("welcome")
            if now >= self.end:
                raise await self.absent(waiting)
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    def _all_met(self) -> bool:
        """Return whether to welcome now: all have come, or one expects another number of them."""
        hellos = [hello for hellos in self._hellos.values() for hello in hellos]
        counted = all(process in self._hellos for process in range(self.count))
        return counted or any(hello.count != self.count for hello in hellos)

    def _live(self, process: int) -> list[Hello]:
        """Return the hellos of a process that have acknowledged this run."""
        return [h for h in self._hellos.get(process, ()) if h.run == self._run_id]

    def _check(self, before: Sequence[Hello]) -> None:
        """Raise if a process runs twice, has another release or expects another process count.

        `before` holds the hellos of process 0 that were posted before its own.
        """
        for other in self._hellos.get(0, ()):
            if other.nonce != self.hello.nonce and other not in before:
                raise self.twice(0, self.hello, other)
        for process in self._hellos:
            for number, hello in enumerate(self._live(process)):
                if number > 0:
                    raise self.twice(process, self._live(process)[0], hello)
                if hello.version != RELEASE:
                    raise UsageError(
                        f"process {process} ({hello}) runs asyncckpt {hello.version}, process 0 "
                        f"({self.hello}) runs {RELEASE}: install the same release everywhere",
                        location=self.root,
                        expected=RELEASE,
                        found=hello.version,
                    )
                if hello.count != self.count:
                    raise UsageError(
                        f"{self.root}: process {process} ({hello}) has process_count="
                        f"{hello.count}, process 0 ({self.hello}) has process_count={self.count}: "
                        "pass the same number everywhere",
                        location=self.root,
                        expected=self.count,
                        found=hello.count,
                    )

    async def _post_hosts(self, hosts: Sequence[str]) -> None:
        runs = [(host, len(list(same))) for host, same in itertools.groupby(hosts)]
        for page, start in enumerate(range(0, len(runs), RUNS)):
            value = json.dumps(runs[start : start + RUNS]).encode()
            await self.coordinator.put(self.key("hosts", page), value)

    async def _post(self, state: str, refusal: Any = None) -> None:
        """Post the welcomes that have changed."""
        # Includes processes beyond the count: if they live, they expect more processes.
        for page in range(1 + max([self.count - 1, *self._hellos]) // PAGE):
            here = range(page * PAGE, (page + 1) * PAGE)
            welcome = {
                "state": state,
                "run": self._run_id,
                "nonces": [h.nonce for p in here for h in self._hellos.get(p, ())],
                "refusal": refusal,
            }
            value = json.dumps(welcome).encode()
            if self._posted.get(page) != value:
                self._posted[page] = value
                await self.coordinator.put(self.key("welcome", page), value)


async def _join(meeting: Meeting) -> Group:
    """Return the group once process 0 says that all agree; for every other process."""
    try:
        run_id = await _acknowledge(meeting)
        hosts = await _hosts(meeting)
    except BaseException:
        # An acknowledgement left behind would look like a process that continues.
        if meeting.hello.run:
            await briefly(meeting.coordinator.delete(meeting.own_key), limit_s=LEAVE_S)
        raise
    return await meeting.group(run_id, hosts)


async def _acknowledge(meeting: Meeting) -> str:
    """Acknowledge the welcome, and return the run id once all agree."""
    await meeting.say(meeting.hello)
    for pause in pauses(meeting.count):
        welcome = await _look(meeting, "welcome", meeting.index // PAGE)
        if welcome is not None and echoes(welcome, meeting.hello.nonce):
            if welcome["state"] == "refused":
                raise decode_error(json.dumps(welcome["refusal"]).encode())
            if welcome["run"] != meeting.hello.run:
                await meeting.say(replace(meeting.hello, run=welcome["run"]))
            elif welcome["state"] == "agreed":
                return meeting.hello.run
        acknowledged = meeting.hello.run != ""
        grace_s = ANSWER_S if acknowledged else REFUSAL_S
        if time.monotonic() >= meeting.end + grace_s:
            raise meeting.silent() if acknowledged else await meeting.absent((0,))
        await asyncio.sleep(pause)
    raise AssertionError("pauses never end")


async def _hosts(meeting: Meeting) -> list[str]:
    hosts: list[str] = []
    page = 0
    while len(hosts) < meeting.count:
        # Posted before process 0 announced that all agree.
        for host, count in await _look(meeting, "hosts", page):
            hosts += [host] * count
        page += 1
    return hosts


async def _look(meeting: Meeting, *parts: object) -> Any:
    value = await meeting.coordinator.look(meeting.key(*parts))
    return None if value is None else json.loads(value)


def echoes(welcome: Mapping[str, Any], nonce: str) -> bool:
    """Return whether a welcome answers the hello with this nonce."""
    return nonce in welcome["nonces"]


def _hellos(met: Mapping[str, bytes]) -> dict[int, list[Hello]]:
    """Return the hellos by process, of which there may be more than expected."""
    hellos: dict[int, list[Hello]] = {}
    for key in sorted(met):
        process = int(key.partition("/")[0])
        hellos.setdefault(process, []).append(Hello.decoded(met[key]))
    return hellos
