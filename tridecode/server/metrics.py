"""What a server counts, as Prometheus reads it; names are vLLM's, with tridecode before the colon.

Counts are plain numbers that asyncio changes and a scrape reads: prometheus-client only writes them down.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ..engine import Engine
from ..results import Usage

OUTCOMES = ("stop", "length", "cancelled", "timeout", "refused", "unavailable", "failed")
FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """Counts of seconds by bucket, the last of which has no end."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def buckets(self) -> list[tuple[str, int]]:
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts):
            total += count
            found.append((bound, total))
        return found

    @property
    def sum(self) -> float:
        return self._sum


class Metrics:
    """Of one server; `text` is what /metrics says."""

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))  # a rate wants a zero before the first
        self._prompt = self._reused = self._drawn = self._drafted = self._accepted = 0
        self._first, self._between, self._whole = Histogram(FIRST), Histogram(BETWEEN), Histogram(WHOLE)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    # ---- what happens

    def heard(self, call, news) -> None:
        """Pieces reached the side of a request's client."""
        now = time.monotonic()
        for number, pieces in news:
            tokens = sum(piece.token_id is not None for piece in pieces)
            self._drawn += tokens
            last, call.last[number] = call.last.get(number), now
            if not tokens:
                continue
            if last is None:
                self._first.observe(now - call.started)
                tokens -= 1  # beside the first those that came with it
                last = now
            if tokens:
                self._between.observe((now - last) / tokens, tokens)

    def read(self, usages: Iterable[Usage]) -> None:
        """The prompts of requests that have ended; those of requests that were cut short are not known."""
        for usage in usages:
            self._prompt += usage.prompt_tokens
            self._reused += usage.reused_tokens
            self._drafted += usage.drafted
            self._accepted += usage.accepted

    def ended(self, outcome: str, seconds: float) -> None:
        self._outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self._whole.observe(seconds)

    # ---- what a scrape reads

    def collect(self):
        load = self._engine.scheduler.load()
        gauges = {
            "num_requests_running": ("requests that have a slot", load.requests - load.waiting),
            "num_requests_waiting": ("requests that wait for a slot", load.waiting),
            "active_rows": ("rows of the next pass", load.rows),
            "slots": ("requests that can run at a time", self._engine.slots),
            "kv_cache_usage_perc": (
                "share of the K/V pages that requests or kept prefixes hold, 0 to 1",
                1 - load.free_pages / load.pages,
            ),
            "kv_pages": ("K/V pages", load.pages),
            "kv_pages_free": ("K/V pages that nobody holds", load.free_pages),
        }
        counters = {
            "num_preemptions": ("requests that gave their pages up and began again", load.preemptions),
            "prompt_tokens": ("tokens of the prompts of requests that ended", self._prompt),
            "prefix_cache_queries": ("tokens of prompts that were looked up in kept prefixes", self._prompt),
            "prefix_cache_hits": ("of these those whose K/V were there", self._reused),
            "generation_tokens": ("tokens drawn", self._drawn),
            "spec_decode_num_draft_tokens": ("tokens guessed for requests that ended", self._drafted),
            "spec_decode_num_accepted_tokens": ("of these those that were right", self._accepted),
        }
        histograms = {
            "time_to_first_token_seconds": ("from a request's arrival to its first token", self._first),
            "inter_token_latency_seconds": ("between the tokens of an answer", self._between),
            "e2e_request_latency_seconds": ("from a request's arrival to its last token", self._whole),
        }
        name = {"model_name": self._model}
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for metric, (help, value) in numbers.items():
                family = kind(f"tridecode:{metric}", help, labels=list(name))
                family.add_metric(list(name.values()), value)
                yield family
        for metric, (help, histogram) in histograms.items():
            seconds = HistogramMetricFamily(f"tridecode:{metric}", help, labels=list(name))
            seconds.add_metric(list(name.values()), histogram.buckets(), histogram.sum)
            yield seconds
        family = CounterMetricFamily("tridecode:requests", "requests by how they ended", labels=[*name, "outcome"])
        for outcome, count in sorted(self._outcomes.items()):
            family.add_metric([self._model, outcome], count)
        yield family
        yield from self._passes()

    def _passes(self):
        labels = ["model_name", "mode", "kind", "rows", "padded"]
        passes = CounterMetricFamily("tridecode:passes", "passes by how they ran", labels=labels)
        padding = 0
        for stat in self._engine.graph_stats():
            passes.add_metric([self._model, stat.mode, stat.kind, str(stat.rows), str(stat.padded)], stat.count)
            padding += stat.padding * stat.count
        yield passes
        family = CounterMetricFamily("tridecode:padding_rows", "rows of passes that nobody wanted", labels=labels[:1])
        family.add_metric([self._model], padding)
        yield family
