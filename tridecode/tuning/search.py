"""A greedy coordinate search over the choices of a pass. It compares the times of the whole pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DeviceError
from ..kernels.linear.registry import LINEAR_KERNELS
from .configs import Choice, PassConfigs

MARGIN = 0.001  # A candidate must be faster by this fraction, which is the noise of the timings.


@dataclass
class Search:
    """The state of a search.

    Attributes:
        configs: the fastest choices so far.
        seconds: the time of a pass with `configs`.
        tried: number of candidates that were measured.
        skipped: number of measured candidates that did not run.
        finished: whether the last round changed nothing.
    """

    configs: PassConfigs
    seconds: float
    tried: int = 0
    skipped: int = 0
    finished: bool = False


def config_of(configs: PassConfigs, part) -> Any:
    """Return the launch config of a part, which is the case of a linear or of attention."""
    return configs.attention[part] if part in configs.attention else configs.linears[part].config


def with_config(configs: PassConfigs, part, config: Any) -> PassConfigs:
    """Return the choices with another config of one part, and with the kernel of that config."""
    if part in configs.attention:
        return replace(configs, attention={**configs.attention, part: config})
    kernel = next(kernel for kernel in LINEAR_KERNELS if kernel.config is type(config))
    return replace(configs, linears={**configs.linears, part: Choice(kernel, config, "user table")})


def search(
    start: PassConfigs,
    candidates: Sequence[tuple[Any, list]],
    measure: Callable[[PassConfigs], float | None],
    deadline: float,
    report: Callable[[Search, int, Any], None] = lambda state, total, part: None,
    prepare: Callable[[list[PassConfigs]], None] = lambda several: None,
    at_once: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Choose the fastest candidate for one part after the other.

    The search ends when a round over all parts changes nothing.

    Args:
        candidates: parts, each with configs or with fields to change in its current config.
        measure: returns the seconds of a pass, or None if it does not run.
        deadline: time of `clock` at which the search ends unfinished.
        report: called before each measurement with the search, the number of candidates of a round, and the part.
        prepare: called with up to `at_once` candidates of a part before they are measured.

    Raises:
        DeviceError: the pass does not run with `start`.
    """
    first = measure(start)
    if first is None:
        raise DeviceError("the pass does not run with its current launch configs; delete the user's table")
    parts = list(dict.fromkeys(part for part, _ in candidates))

    def key(configs: PassConfigs) -> tuple:
        return tuple(config_of(configs, part) for part in parts)

    state, known, at_start = Search(start, first), {key(start)}, None
    total = sum(len(tried) for _, tried in candidates)
    while at_start != state.configs:
        at_start = state.configs
        for part, tried in candidates:
            base = state.configs
            unique: dict[tuple, PassConfigs] = {}
            for values in tried:
                config = replace(config_of(base, part), **values) if isinstance(values, dict) else values
                candidate = with_config(base, part, config)
                unique.setdefault(key(candidate), candidate)
            new = [candidate for name, candidate in unique.items() if name not in known]
            known.update(map(key, new))
            for i, candidate in enumerate(new):
                if clock() >= deadline:
                    return state
                report(state, total, part)
                if i % at_once == 0:
                    prepare(new[i : i + at_once])
                seconds = measure(candidate)
                state.tried += 1
                if seconds is None:
                    state.skipped += 1
                elif seconds < state.seconds * (1 - MARGIN):
                    state.seconds, state.configs = seconds, candidate
    state.finished = True
    return state
