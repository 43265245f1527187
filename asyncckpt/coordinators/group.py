"""Processes after the handshake, the keys of their run, and errors about missing processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.coordinators.key_values import PREFIX
from asyncckpt.errors import SaveError, SaveOutcomeUnknownError, UsageError
from asyncckpt.ports import Coordinator
from asyncckpt.reports.texts import few

BYE = "bye"
"""Directory of the keys that processes set when they leave the group."""


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that have completed a handshake.

    Attributes:
        coordinator: carries their messages.
        run_id: 32 hex digits, the same on all processes and new at every handshake.
        hosts: name of the host of each process.
        meeting: prefix of the keys of the handshake, which `part` deletes.
    """

    coordinator: Coordinator
    run_id: str
    process_index: int
    process_count: int
    hosts: tuple[str, ...]
    meeting: str

    @property
    def host(self) -> str:
        """Name of the host of this process."""
        return self.hosts[self.process_index]

    @property
    def processes_on_host(self) -> int:
        """Number of processes on this host, this one included."""
        return self.hosts.count(self.host)

    def key(self, *parts: str) -> str:
        """Return a key of this run."""
        return "/".join((PREFIX, self.run_id, *parts))

    def named(self, process: int) -> str:
        """Return the name of a process in messages."""
        return f"process {process} ({self.hosts[process]})"

    def listed(self, processes: Sequence[int]) -> str:
        """Return the names of several processes in messages, the first few one by one."""
        return few([self.named(process) for process in processes])


async def part(group: Group) -> None:
    """Leave the group; the last process to leave deletes its keys."""
    await group.coordinator.put(group.key(BYE, str(group.process_index)), b"bye")
    gone = await group.coordinator.list(group.key(BYE))
    if len(gone) == group.process_count:
        # Several processes may find that they are last; deleting keys twice does no harm. If there
        # are hellos of others, a later job meets there.
        hellos = await group.coordinator.list(f"{group.meeting}/hello")
        if all(group.run_id.encode() in hello for hello in hellos.values()):
            await group.coordinator.delete(group.meeting)
        await group.coordinator.delete(group.key())


async def departed(group: Group) -> tuple[int, ...]:
    """Return the processes that have left; process 0 checks all, the others only process 0."""
    if group.process_index:
        return () if await group.coordinator.look(group.key(BYE, "0")) is None else (0,)
    return tuple(sorted(map(int, await group.coordinator.list(group.key(BYE)))))


def closed_error(group: Group, closed: Sequence[int]) -> UsageError:
    """Return the error for processes that have closed their `Checkpointer`."""
    has = "has" if len(closed) == 1 else "have"
    return UsageError(
        f"{group.listed(closed)} {has} closed the Checkpointer that is still in use here, so "
        "this call has failed. Make the same calls on all processes, then close it on all; or pass "
        'coordinator="single" where one process works alone',
        expected=group.process_count,
        found=group.process_count - len(closed),
    )


def silent_error(group: Group, silent: Sequence[int], silence_s: float) -> SaveError:
    """Return the error for processes that no longer post beats."""
    return SaveError(
        f"{group.listed(silent)} gave no sign of life for {silence_s:g} s (silence_s) and may have "
        "died, so this call has failed. Restart the job",
        expected=group.process_count,
        found=group.process_count - len(silent),
    )


def late_error(
    group: Group, call: str, late: Sequence[int], elsewhere: Sequence[int], arrival_s: float
) -> SaveError:
    """Return the error for `late` processes; of these, those `elsewhere` are in another call."""
    arrived = group.process_count - len(late)
    are = "is" if len(elsewhere) == 1 else "are"
    busy = f" ({group.listed(elsewhere)} {are} in another call)" if elsewhere else ""
    return SaveError(
        f"{arrived} of {group.process_count} processes made this call, {call}; "
        f"{group.listed(late)} did not within {arrival_s:g} s (arrival_s){busy}. Call it on all "
        'processes, or pass coordinator="single" where one process works alone',
        expected=group.process_count,
        found=arrived,
    )


def other_call_error(group: Group, process: int, other: str, call: str) -> UsageError:
    """Return the error for a process whose call differs from that of process 0."""
    return UsageError(
        f"{group.named(process)} called {other} where {group.named(0)} called {call}: all "
        "processes make the same calls in the same order",
        expected=call,
        found=other,
    )


def behind_error(group: Group, call: str) -> UsageError:
    """Return the error for a call of this process that has already failed on the others."""
    return UsageError(
        f"{group.named(group.process_index)} calls {call}, which has failed already on another "
        "process, because the calls of the processes differed: it is skipped here, so that all "
        "processes make the next call together"
    )


def unknown_error(group: Group, call: str) -> SaveOutcomeUnknownError:
    """Return the error for a process 0 that fell silent between its decision and the outcome."""
    return SaveOutcomeUnknownError(
        f"{group.named(0)} has fallen silent in {call}, after it had decided to commit: whether it "
        "did is unknown. Restart the job, and check steps() first"
    )
