"""Facts about the machine and the directory that figures depend on."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from benchmarks.measure import proc_nbytes, proc_value
from benchmarks.peers import versions

MIB = 1 << 20


def facts(directory: Path) -> dict[str, object]:
    """Cores, memory, file system and versions; nothing that names the machine or its user."""
    return {
        "cores": usable_cores(),
        "processor": _processor(),
        "memory": f"{_memory_nbytes() / 2**30:.0f} GiB",
        "file system": file_system(directory),
        "system": f"{platform.system()} {platform.release()}",
        "huge pages": _huge_pages(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def file_system(directory: Path) -> str:
    """Type of the file system that holds the directory; `unknown` elsewhere than Linux."""
    path = directory.resolve()
    best, kind = -1, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind


def refusal(directory: Path, disk_nbytes: int, memory_nbytes: int) -> str | None:
    """Why the suite cannot run here, with what would help; None when it can."""
    free = shutil.disk_usage(directory).free
    if free < disk_nbytes:
        return (
            f"{directory} has {free / MIB:.0f} MiB free and the suite needs "
            f"{disk_nbytes / MIB:.0f} MiB; name another directory with --dir, or measure less "
            "with --size"
        )
    available = available_nbytes()
    if available is not None and available < memory_nbytes:
        return (
            f"{available / MIB:.0f} MiB of memory are available and the suite needs "
            f"{memory_nbytes / MIB:.0f} MiB; measure less with --size"
        )
    return None


def available_nbytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    return proc_nbytes("meminfo", "MemAvailable")


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    return proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
