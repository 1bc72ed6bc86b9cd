"""Limits of this process's control groups on memory and CPU time, for cgroup v2 and v1."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNTED, PROCESS_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CACHE = ("inactive_file", "active_file")  # Page cache of files. The kernel frees it before it refuses memory.


def free_memory(mounted: Path = MOUNTED, own: Path = PROCESS_CGROUP) -> float:
    """Return the free bytes under the strictest memory limit, or infinity without a limit."""
    left = [float("inf")]
    for group in _groups("memory", mounted, own):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            if memory_limit := _numbers(group / limit):
                stat = dict(re.findall(r"(?m)^(\w+) (\d+)$", _text(group / "memory.stat")))
                cache = sum(int(stat.get(prefix + name, 0)) for name in CACHE)
                left.append(max(memory_limit[0] - max(sum(_numbers(group / used)) - cache, 0), 0))
    return min(left)


def cpus(mounted: Path = MOUNTED, own: Path = PROCESS_CGROUP) -> float:
    """Return the number of CPUs that the strictest quota allows, or infinity without a quota."""
    quotas = [float("inf")]
    for group in _groups("cpu", mounted, own):
        quota = _numbers(group / "cpu.max")
        quota = quota or [*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")]
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:  # cgroup v1 writes -1 if there is no quota.
            quotas.append(quota[0] / quota[1])
    return min(quotas)


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[Path]:
    """Yield the directories of this process's control group and of its ancestors.

    In a container some may be invisible.
    """
    for _, controllers, path in re.findall(r"(?m)^(\d+):(.*?):(.*)$", _text(own)):
        if not controllers:
            base = mounted
        elif controller in controllers.split(","):
            base = mounted / controller
        else:
            continue
        place = PurePosixPath("/" if ".." in path else path)
        for group in (place, *place.parents):
            yield base / str(group).lstrip("/")


def _numbers(file: Path) -> list[int]:
    """Return the integers in a file; an empty list if it is absent or contains "max"."""
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        return []


def _text(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
