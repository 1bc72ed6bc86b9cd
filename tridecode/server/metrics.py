"""Metrics of a server for Prometheus. The names are vLLM's, with the prefix `tridecode:`.

asyncio updates plain numbers, and a scrape reads them; prometheus-client only formats the output.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ..engine import Engine
from ..results import Usage
from .settings import Settings

OUTCOMES = ("stop", "length", "cancelled", "timeout", "refused", "unavailable", "failed")
# Upper bounds of the histogram buckets in seconds.
FIRST_TOKEN_BOUNDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
INTER_TOKEN_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5,
)  # fmt: skip
REQUEST_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """Counts of durations in seconds by bucket; the last bucket has no upper bound."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration `times` times."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def buckets(self) -> list[tuple[str, int]]:
        """Return (upper bound, cumulative count) for each bucket."""
        total, cumulative = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts):
            total += count
            cumulative.append((bound, total))
        return cumulative

    @property
    def sum(self) -> float:
        """Sum of all durations in seconds."""
        return self._sum


class Metrics:
    """Metrics of one server; `text` is the body of /metrics."""

    def __init__(self, engine: Engine, settings: Settings):
        self._engine = engine
        # Labels of every sample.
        self._labels = {"model_name": settings.model} | ({"replica": settings.replica} if settings.replica else {})
        # Prometheus computes rates from the first sample, so each outcome starts at zero.
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        # Adapter -> requests that ended, and their output tokens. "" is the base model.
        self._adapters: dict[str, tuple[int, int]] = {"": (0, 0)}
        self._prompt = self._reused = self._sampled = self._drafted = self._accepted = 0
        self._first_token, self._inter_token = Histogram(FIRST_TOKEN_BOUNDS), Histogram(INTER_TOKEN_BOUNDS)
        self._request = Histogram(REQUEST_BOUNDS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    # ---- updates

    def observe_chunks(self, call, new) -> None:
        """Count the tokens of (request number, output chunks) pairs that reached a call, and their latencies."""
        now = time.monotonic()
        for number, chunks in new:
            tokens = sum(chunk.token_id is not None for chunk in chunks)
            self._sampled += tokens
            last, call.last[number] = call.last.get(number), now
            if not tokens:
                continue
            if last is None:
                self._first_token.observe(now - call.started)
                tokens -= 1  # The tokens that arrived with the first one do not count.
                last = now
            if tokens:
                self._inter_token.observe((now - last) / tokens, tokens)

    def observe_usages(self, usages: Iterable[Usage], adapter: str | None = None) -> None:
        """Count the usage of requests that have ended. Requests that were canceled have no usage."""
        for usage in usages:
            requests, tokens = self._adapters.get(adapter or "", (0, 0))
            self._adapters[adapter or ""] = requests + 1, tokens + usage.completion_tokens
            self._prompt += usage.prompt_tokens
            self._reused += usage.reused_tokens
            self._drafted += usage.drafted
            self._accepted += usage.accepted

    def observe_outcome(self, outcome: str, seconds: float) -> None:
        """Count a request that ended after `seconds`."""
        self._outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self._request.observe(seconds)

    # ---- scrapes

    def collect(self):
        """Yield the metrics; prometheus-client calls this for each scrape."""
        load, adapters = self._engine.scheduler.load(), self._engine.adapter_load()
        gauges = {
            "num_requests_running": ("requests that have a slot", load.requests - load.waiting),
            "num_requests_waiting": ("requests that wait for a slot", load.waiting),
            "active_rows": ("rows of the next pass", load.rows),
            "slots": ("maximum number of running requests", self._engine.slots),
            "kv_cache_usage_perc": (
                "share of the K/V pages that requests or cached prefixes use, 0 to 1",
                1 - load.free_pages / load.pages,
            ),
            "kv_pages": ("K/V pages", load.pages),
            "kv_pages_free": ("unused K/V pages", load.free_pages),
            "snapshots": ("snapshots of recurrent state", load.snapshots),
            "snapshot_bytes": ("bytes of these snapshots", load.snapshots * self._engine.plan.snapshot_bytes),
            "adapters": ("loaded adapters", len(self._engine.adapters)),
            "adapters_on_device": ("adapters on the device", adapters.on_device),
            "adapter_places": ("maximum number of adapters on the device", adapters.size),
        }
        counters = {
            "num_preemptions": ("requests that were preempted and restarted", load.preemptions),
            "prompt_tokens": ("tokens of the prompts of requests that ended", self._prompt),
            "prefix_cache_queries": ("prompt tokens that were looked up in the prefix cache", self._prompt),
            "prefix_cache_hits": ("prompt tokens whose K/V were in the prefix cache", self._reused),
            "snapshot_hits": ("requests that resumed from a snapshot", load.snapshot_hits),
            "adapter_loads": ("copies of adapters to the device", adapters.loads),
            "generation_tokens": ("sampled tokens", self._sampled),
            "spec_decode_num_draft_tokens": ("draft tokens of requests that ended", self._drafted),
            "spec_decode_num_accepted_tokens": ("accepted draft tokens of requests that ended", self._accepted),
        }
        histograms = {
            "time_to_first_token_seconds": ("from a request's arrival to its first token", self._first_token),
            "inter_token_latency_seconds": ("between the tokens of an answer", self._inter_token),
            "e2e_request_latency_seconds": ("from a request's arrival to its last token", self._request),
        }
        names, values = [*self._labels], [*self._labels.values()]
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for metric, (help, value) in numbers.items():
                family = kind(f"tridecode:{metric}", help, labels=names)
                family.add_metric(values, value)
                yield family
        for metric, (help, histogram) in histograms.items():
            seconds = HistogramMetricFamily(f"tridecode:{metric}", help, labels=names)
            seconds.add_metric(values, histogram.buckets(), histogram.sum)
            yield seconds
        family = CounterMetricFamily("tridecode:requests", "requests by outcome", labels=[*names, "outcome"])
        for outcome, count in sorted(self._outcomes.items()):
            family.add_metric([*values, outcome], count)
        yield family
        yield from self._passes()
        yield from self._by_adapter()

    def _by_adapter(self):
        labels, values = [*self._labels, "adapter"], [*self._labels.values()]
        requests = CounterMetricFamily("tridecode:adapter_requests", "requests that ended, by adapter", labels=labels)
        tokens = CounterMetricFamily("tridecode:adapter_generation_tokens", "tokens of these answers", labels=labels)
        for adapter, (ended, sampled) in sorted(self._adapters.items()):
            requests.add_metric([*values, adapter], ended)
            tokens.add_metric([*values, adapter], sampled)
        yield requests
        yield tokens

    def _passes(self):
        names, values = [*self._labels], [*self._labels.values()]
        labels = [*names, "mode", "kind", "rows", "padded"]
        passes = CounterMetricFamily("tridecode:passes", "passes by mode, kind and rows", labels=labels)
        padding = 0
        for stat in self._engine.graph_stats():
            passes.add_metric([*values, stat.mode, stat.kind, str(stat.rows), str(stat.padded)], stat.count)
            padding += stat.padding * stat.count
        yield passes
        family = CounterMetricFamily("tridecode:padding_rows", "padding rows of passes", labels=names)
        family.add_metric(values, padding)
        yield family
