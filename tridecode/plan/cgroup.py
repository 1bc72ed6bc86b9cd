"""What the control groups of this process leave it: memory and CPU time, by cgroup v2 and v1."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNTED, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CACHE = ("inactive_file", "active_file")  # pages of files: given back before anything is refused


def free_memory(mounted: Path = MOUNTED, own: Path = OWN) -> float:
    """Bytes that the tightest limit leaves; infinite without a limit."""
    left = [float("inf")]
    for group in _groups("memory", mounted, own):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            if most := _numbers(group / limit):
                found = dict(re.findall(r"(?m)^(\w+) (\d+)$", _text(group / "memory.stat")))
                cache = sum(int(found.get(prefix + name, 0)) for name in CACHE)
                left.append(max(most[0] - max(sum(_numbers(group / used)) - cache, 0), 0))
    return min(left)


def cpus(mounted: Path = MOUNTED, own: Path = OWN) -> float:
    """CPUs' worth of time that the tightest quota gives; infinite without a quota."""
    quotas = [float("inf")]
    for group in _groups("cpu", mounted, own):
        given = _numbers(group / "cpu.max")
        given = given or [*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")]
        if len(given) == 2 and given[0] > 0 and given[1] > 0:  # v1 writes -1 where there is none
            quotas.append(given[0] / given[1])
    return min(quotas)


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[Path]:
    """Directories of the group of this process and of those above it; some may not be visible here."""
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
    """The integers in a file; none where it is absent or says "max"."""
    try:
        return [int(word) for word in _text(file).split()]
    except ValueError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
