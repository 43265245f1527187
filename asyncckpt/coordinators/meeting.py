"""State shared by both sides of a handshake: hellos, keys, and errors about missing processes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.key_values import PREFIX
from asyncckpt.coordinators.rounds import briefly
from asyncckpt.errors import UsageError
from asyncckpt.ports import Coordinator
from asyncckpt.reports.texts import NAMES_MAX, few
from asyncckpt.version import PROTOCOL, VERSION

HOST_LENGTH = 64
"""Characters of a host name that are kept: the limit of Linux."""

RELEASE = f"{VERSION} (protocol {PROTOCOL})"
"""Release that all processes of a job must run; compared as a whole, also by older releases."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Message by which a process introduces itself.

    Attributes:
        nonce: 16 hex digits, new at every handshake.
        version: release and protocol of this library.
        run: run id of the welcome that it acknowledges; empty before that.
        count: number of processes that it expects.
    """

    nonce: str
    host: str
    pid: int
    version: str = RELEASE
    run: str = ""
    count: int = 0

    def encoded(self) -> bytes:
        """Return the hello as a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Hello:
        """Return the hello in a message, which may be of another release with other fields."""
        fields = json.loads(data)
        return cls(**{field: fields[field] for field in cls.__slots__ if field in fields})

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(eq=False, repr=False)
class Meeting:
    """State and errors of either side of a handshake; arguments as of `shake_hands`."""

    coordinator: Coordinator
    root: str
    opened: int
    arrival_s: float

    def __post_init__(self) -> None:
        self.index = self.coordinator.process_index
        self.count = self.coordinator.process_count
        self.end = time.monotonic() + self.arrival_s
        host = socket.gethostname()[:HOST_LENGTH]
        self.hello = Hello(secrets.token_hex(8), host, os.getpid(), count=self.count)
        digest = hashlib.sha256(self.root.encode(errors="surrogatepass")).hexdigest()
        self.place = f"{PREFIX}/{digest[:32]}"
        self.prefix = f"{self.place}/{self.opened}"

    def key(self, *parts: object) -> str:
        return "/".join((self.prefix, *map(str, parts)))

    @property
    def own_key(self) -> str:
        return self.key("hello", self.index, self.hello.nonce)

    async def say(self, hello: Hello) -> None:
        self.hello = hello
        await self.coordinator.put(self.own_key, hello.encoded())

    async def group(self, run_id: str, hosts: Sequence[str]) -> Group:
        """Return the group; delete this process's earlier hellos, which would fill the welcomes."""
        # A failure must not part this process from the others, which have agreed already.
        await briefly(self._tidy())
        return Group(self.coordinator, run_id, self.index, self.count, tuple(hosts), self.prefix)

    async def _tidy(self) -> None:
        for nonce in await self.coordinator.list(self.key("hello", self.index)):
            if nonce != self.hello.nonce:
                await self.coordinator.delete(self.key("hello", self.index, nonce))

    async def absent(self, unheard: Collection[int]) -> UsageError:
        """Return the error for processes that have not come in time.

        Hellos of the processes in `unheard`, which did not answer, are of an earlier life.
        """
        come: set[int] = set()
        others: dict[int, int] = {}
        for key in await self.coordinator.list(self.place):
            opened, kind, place, *_ = (*key.split("/"), "", "")
            if kind == "hello":
                process = int(place)
                if int(opened) != self.opened:
                    others[process] = max(int(opened), others.get(process, 0))
                elif process < self.count and process not in unheard:
                    come.add(process)
        missing = [process for process in range(self.count) if process not in come]
        counts = [f"process {p} has opened it {others[p]} times" for p in missing if p in others]
        why = ""
        if counts:
            why = (
                f"; {', '.join(counts[:NAMES_MAX])}, process {self.index} {self.opened} times: "
                "every process must create the same Checkpointers"
            )
        return UsageError(
            f"{self.root}: process {self.index} of {self.count} waited {self.arrival_s:g} s for "
            f"{listed(missing)}; here: {listed(sorted(come))}{why}. All processes must make this "
            'call; pass coordinator="single" if one process works alone',
            location=self.root,
            expected=self.count,
            found=len(come),
        )

    def silent(self) -> UsageError:
        """Return the error for a process 0 that fell silent after welcoming this process."""
        return UsageError(
            f"{self.root}: process 0 of {self.count} has welcomed process {self.index}, but then "
            "neither continued nor reported an error: it may have died. Restart the job",
            location=self.root,
        )

    def twice(self, process: int, one: Hello, other: Hello) -> UsageError:
        """Return the error for two handshakes with the same index, of one or two programs."""
        if (one.pid, one.host) == (other.pid, other.host):
            what = (
                f"({one}) has opened it twice at once. Finish the first call of one Checkpointer "
                "or function before that of the next one, in the same order on all processes. If "
                "these are two programs, in two containers of one name, give each its own index"
            )
        else:
            what = (
                f"runs twice: {one}, and {other}. Give every process its own index, and end the "
                "processes of earlier runs"
            )
        return UsageError(
            f"{self.root}: process {process} of {self.count} {what}",
            location=self.root,
            expected=str(one),
            found=str(other),
        )


def listed(processes: Sequence[int]) -> str:
    """Return text that lists the first few processes."""
    if not processes:
        return "no process"
    return f"process{'es' if len(processes) > 1 else ''} {few(list(map(str, processes)))}"
