"""A greedy coordinate search over the choices of a pass, judged by the time of the whole pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DeviceError
from ..kernels.linear.registry import LINEAR_KERNELS
from .configs import Choice, PassConfigs

MARGIN = 0.001  # a candidate must be faster by this part of the pass; timings do not agree better


@dataclass
class Search:
    """The state of a search. seconds: the time of a pass with `configs`. tried, skipped: the numbers of candidates that
    were measured, and of these that did not run.
    """

    configs: PassConfigs
    seconds: float
    tried: int = 0
    skipped: int = 0
    finished: bool = False


def config_of(configs: PassConfigs, part) -> Any:
    """Return the launch config of a part: a case of a linear or of attention."""
    return configs.attention[part] if part in configs.attention else configs.linears[part].config


def with_config(configs: PassConfigs, part, config: Any) -> PassConfigs:
    """Return the choices with another config of one part, and with the kernel that it belongs to."""
    if part in configs.attention:
        return replace(configs, attention={**configs.attention, part: config})
    kernel = next(kernel for kernel in LINEAR_KERNELS if kernel.config is type(config))
    return replace(configs, linears={**configs.linears, part: Choice(kernel, config, "user table")})


def search(
    start: PassConfigs,
    candidates: Sequence[tuple[Any, list]],
    measure: Callable[[PassConfigs], float | None],
    deadline: float,
    report: Callable[[Search, int, Any], None] = lambda found, total, part: None,
    prepare: Callable[[list[PassConfigs]], None] = lambda several: None,
    at_once: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Take the fastest candidate of one part after the other, the other parts unchanged, until a round changes nothing.

    Args:
        candidates: parts, each with configs or with fields to change in its present config.
        measure: seconds of a pass, None if it does not run.
        deadline: of `clock`; then the search ends unfinished.
        report: called before each measurement with the search, the candidates of a round and the part.
        prepare: called before the measurements of up to `at_once` candidates of a part.

    Raises:
        DeviceError: the pass does not run with `start`.
    """
    first = measure(start)
    if first is None:
        raise DeviceError("the step does not run with the launch configs that it has now")
    parts = list(dict.fromkeys(part for part, _ in candidates))

    def key(configs: PassConfigs) -> tuple:
        return tuple(config_of(configs, part) for part in parts)

    found, known, at_start = Search(start, first), {key(start)}, None
    total = sum(len(tried) for _, tried in candidates)
    while at_start != found.configs:
        at_start = found.configs
        for part, tried in candidates:
            base = found.configs
            unique: dict[tuple, PassConfigs] = {}
            for values in tried:
                config = replace(config_of(base, part), **values) if isinstance(values, dict) else values
                candidate = with_config(base, part, config)
                unique.setdefault(key(candidate), candidate)
            new = [candidate for name, candidate in unique.items() if name not in known]
            known.update(map(key, new))
            for i, candidate in enumerate(new):
                if clock() >= deadline:
                    return found
                report(found, total, part)
                if i % at_once == 0:
                    prepare(new[i : i + at_once])
                seconds = measure(candidate)
                found.tried += 1
                if seconds is None:
                    found.skipped += 1
                elif seconds < found.seconds * (1 - MARGIN):
                    found.seconds, found.configs = seconds, candidate
    found.finished = True
    return found
