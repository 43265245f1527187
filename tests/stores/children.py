"""What the store's tests run in processes of their own: `python -c "…children import …; f(…)"`.

Each function prints one JSON value per line on standard output.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt.errors import AsyncCheckpointError, SaveError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local import posix
from asyncckpt.stores.local.store import LocalStore

REPOSITORY = Path(__file__).parents[2]
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
NOBODY = 65534


def start(function: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs a function of this module."""
    call = f"{function}(*{arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.stores.children import *; {call}"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(child: subprocess.Popen[str]) -> Any:
    """The next value that the process prints."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"the process ended with status {child.wait()}"
    return json.loads(line)


def tell(child: subprocess.Popen[str], text: str = "") -> None:
    """The process has read one more line."""
    assert child.stdin is not None
    child.stdin.write(text + "\n")
    child.stdin.flush()


def end(child: subprocess.Popen[str], *, kill: bool = False) -> None:
    """The process has ended and its pipes are closed."""
    if kill:
        child.kill()
    child.communicate()


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def with_store(root: str | Path, use: Callable[[LocalStore], Awaitable[Any]]) -> None:
    """The local store at the root is used, in a loop of its own."""

    async def main() -> None:
        workers = Workers(2, "io")
        store = LocalStore(root, workers)
        try:
            await use(store)
        finally:
            await store.close()
            workers.shutdown()

    asyncio.run(main())


def attempted(root: str, work: Callable[[LocalStore], Awaitable[None]]) -> dict[str, bool]:
    """Whether the work was done; if it raised, whether what it made is visible."""
    found = {"done": False, "visible": False}

    async def use(store: LocalStore) -> None:
        try:
            await work(store)
            found["done"] = True
        except SaveError as error:
            found["visible"] = error.visible
        except AsyncCheckpointError:
            pass

    with_store(root, use)
    return found


def fresh(
    prepare: Callable[[Path, str], None], place: Path, scenario: str
) -> Callable[[int], dict[str, Any]]:
    """What each run of a fork server is called with: a root that was prepared for it alone."""

    def make(number: int) -> dict[str, Any]:
        root = place / str(number)
        prepare(root, scenario)
        return {"root": str(root), "scenario": scenario}

    return make


def unsupported(source: str, target: str) -> None:
    """In place of a rename that file systems such as NFS do not have."""
    raise posix.UnsupportedCallError("renameat2")


def hold_attempt(root: str, name: str, save_id: str) -> None:
    """Begins an attempt, writes to it, says so, and publishes when told."""

    async def use(store: LocalStore) -> None:
        attempt = await store.begin(name, save_id)
        file = await attempt.create("default/d/data", nbytes=1 << 20)
        await file.write(0, np.ones(1 << 20, np.uint8))
        await file.seal(1 << 20)
        say("begun")
        sys.stdin.readline()
        await attempt.publish(b"record")
        say("published")

    with_store(root, use)


def race(root: str, who: str, rounds: int, overwrite: bool) -> None:
    """Publishes one name per round, when told, and says how it went."""

    async def use(store: LocalStore) -> None:
        for number in range(rounds):
            attempt = await store.begin(str(number), f"{who}-{number}", overwrite=overwrite)
            await attempt.put("data", who.encode())
            say("ready")
            sys.stdin.readline()
            try:
                await attempt.publish(who.encode())
            except AsyncCheckpointError as error:
                say(type(error).__name__)
            else:
                say("published")

    with_store(root, use)


def begin_many(root: str, who: str, rounds: int) -> None:
    """Begins and publishes as fast as it can; says how often it failed."""

    async def use(store: LocalStore) -> None:
        failed = []
        for number in range(rounds):
            try:
                attempt = await store.begin(f"{who}-{number}", f"{who}-{number}")
                await attempt.put("data", b"x")
                await attempt.publish(b"record")
            except AsyncCheckpointError as error:
                failed.append(str(error))
        say(failed)

    with_store(root, use)


def overwrite_many(root: str, rounds: int) -> None:
    """Replaces the checkpoint `1` again and again."""

    async def use(store: LocalStore) -> None:
        for number in range(rounds):
            attempt = await store.begin("1", f"o{number}", overwrite=True)
            await attempt.put("data", b"%d" % number)
            await attempt.publish(b"%d" % number)
        say("done")

    with_store(root, use)


def save_and_report(root: str, nbytes: int) -> None:
    """Saves one file and says how that failed."""

    async def use(store: LocalStore) -> None:
        found: dict[str, object] = {"names": []}
        try:
            attempt = await store.begin("1", "a")
            try:
                file = await attempt.create("default/d/data", nbytes=nbytes)
                data = np.ones(1 << 20, np.uint8)
                for offset in range(0, nbytes, data.size):
                    await file.write(offset, data)
                await file.seal(nbytes)
                await attempt.publish(b"record")
            except BaseException:
                await attempt.abort()
                raise
        except AsyncCheckpointError as error:
            found |= {"kind": type(error).__name__, "text": str(error)}
        try:
            found["names"] = await store.names()
            found["left"] = sorted(str(path) for path in Path(root).rglob("*"))
        except AsyncCheckpointError as error:
            found["names"] = str(error)
        say(found)

    with_store(root, use)


def save_on_full_disk(root: str) -> None:
    """On a file system of 4 MiB, or else with a file size limit of 1 MiB; says which first."""
    if mounted("tmpfs", root, "tmpfs", 0, "size=4m"):
        say("ENOSPC")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        say("EFBIG")
    save_and_report(root, 8 << 20)


def delete_on_full_disk(root: str, options: str, epoch: str) -> None:
    """Saves on a small file system, fills it, says an error, deletes, says what is left.

    Where nothing can be mounted, the disk is not full.
    """
    from asyncckpt.errors import StoreError
    from asyncckpt.testing.checkpoints import delete, identity, save

    small = mounted("tmpfs", root, "tmpfs", 0, options)

    async def use(store: LocalStore) -> None:
        claimed = 0
        if epoch:  # a run that has deleted before, which has made the lock
            claimed = (await store.claim()).epoch
            await save(store, "0", "c", epoch=claimed)
            await delete(store, "0", epoch=claimed)
        await save(store, "1", "a", epoch=claimed)
        (Path(root) / "link").symlink_to("1")
        await store.close()  # removes the control directory
        text = ""
        if small:
            try:
                for number in range(1000):
                    (Path(root) / f"filling-{number}").write_bytes(bytes(1 << 16))
            except OSError:
                pass
            try:
                await store.begin("2", identity("b"), epoch=claimed)
            except StoreError as error:
                text = str(error)
        say(text)
        await delete(store, "link", epoch=claimed)
        await delete(store, "1", epoch=claimed)
        await store.close()
        left = sorted(path.name for path in Path(root).rglob("*"))
        say([name for name in left if not name.startswith("filling")])

    with_store(root, use)


def delete_in_lower_layer(root: str) -> None:
    """Deletes a checkpoint of the lower layer of an overlay; says what is left.

    Where nothing can be mounted, it is an ordinary directory.
    """
    from asyncckpt.testing.checkpoints import delete, save

    top = Path(root)
    merged, lower = top / "merged", top / "lower"
    small = mounted("tmpfs", root, "tmpfs", 0, "size=4m")
    for path in (merged, lower, top / "upper", top / "work"):
        path.mkdir()

    async def saving(store: LocalStore) -> None:
        await save(store, "1", "a")

    async def deleting(store: LocalStore) -> None:
        await delete(store, "1")
        say(await store.names())

    layers = f"lowerdir={lower},upperdir={top}/upper,workdir={top}/work"
    with_store(str(lower if small else merged), saving)
    if small and not mounted("overlay", str(merged), "overlay", 0, layers, new=False):
        lower.rename(merged)
    with_store(str(merged), deleting)
    say(sorted(str(path) for path in merged.iterdir()))


def delete_with_a_mount_inside(root: str, outside: str) -> None:
    """Deletes a checkpoint with a mount point in it, says if there is one, and the error."""
    from asyncckpt.errors import StoreError
    from asyncckpt.testing import checkpoints

    async def delete(store: LocalStore) -> None:
        try:
            await checkpoints.delete(store, "1")
            say("")
        except StoreError as error:
            say(str(error))

    with_store(root, lambda store: checkpoints.save(store, "1", "a"))
    inside = os.path.join(root, "1", "data")
    os.mkdir(inside)
    say(mounted(outside, inside, "", MS_BIND, ""))  # for threads that begin from now on
    with_store(root, delete)


def save_read_only(root: str) -> None:
    """On a read-only mount, or else as somebody without rights; says which first."""
    if mounted(root, root, "", MS_BIND, "") and mounted(
        root, root, "", MS_BIND | MS_REMOUNT | MS_RDONLY, "", new=False
    ):
        say("EROFS")
        save_and_report(root, 1 << 20)
    else:
        save_without_rights(root)


def save_without_rights(root: str) -> None:
    """As a user who may read the root only."""
    os.chmod(root, 0o555)
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    say("EACCES")
    save_and_report(root, 1 << 20)


def mounted(
    source: str, target: str, kind: str, flags: int, data: str, *, new: bool = True
) -> bool:
    """Whether this mount exists now, in a name space of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if new:
        uid, gid = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWNS if uid == 0 else CLONE_NEWNS | CLONE_NEWUSER) != 0:
            return False
        if uid != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
            return False
    arguments = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    return bool(libc.mount(*arguments) == 0)


def take_over(root: str, name: str) -> None:
    """Takes over when told, says the epoch (0: another one was faster), then saves when told."""
    from asyncckpt.errors import FencedError
    from asyncckpt.testing import checkpoints

    async def use(store: LocalStore) -> None:
        say("ready")
        sys.stdin.readline()
        try:
            epoch = (await store.claim()).epoch
        except FencedError:
            epoch = 0
        say(epoch)
        sys.stdin.readline()
        try:
            if not epoch:
                raise FencedError("another process was faster")
            await checkpoints.save(store, name, name, int(name), epoch=epoch)
            say("saved")
        except FencedError:
            say("FencedError")

    with_store(root, use)
