"""One scrape for a fleet: the metrics of all replicas with the label `replica`, and those of the gateway."""

import re
from collections.abc import Iterable, Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)")


def merged(
    texts: Iterable[tuple[str, bytes]],
    ready: Mapping[str, int],
    counts: Mapping[tuple[str, str], int],
    outcomes: Mapping[str, int],
) -> bytes:
    """Return the metrics in Prometheus' text format.

    Args:
        texts: (name of a replica, its metrics) pairs.
        ready: model -> replicas that are ready.
        counts: (model, event) -> number of events: retried, broken.
        outcomes: outcome -> number of requests.
    """
    heads: dict[str, list[str]] = {}  # Family -> its comments.
    samples: dict[str, list[str]] = {}
    for replica, text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                own = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{own}}} {value}")
    lines = [line for family, each in samples.items() for line in (*heads.get(family, ()), *each)]
    lines += _family("fleet_replicas", "gauge", "replicas that are ready")
    lines += [f'tridecode:fleet_replicas{{model_name="{model}"}} {count}' for model, count in ready.items()]
    lines += _family("fleet_requests_total", "counter", "requests by outcome at this gateway")
    lines += [f'tridecode:fleet_requests_total{{outcome="{name}"}} {count}' for name, count in sorted(outcomes.items())]
    for event, help in (
        ("retried", "requests that were sent to another replica because the first one failed without a token"),
        ("broken", "streams that ended with an error because their replica failed"),
    ):
        lines += _family(f"fleet_{event}_total", "counter", help)
        lines += [
            f'tridecode:fleet_{event}_total{{model_name="{model}"}} {counts.get((model, event), 0)}' for model in ready
        ]
    return "".join(f"{line}\n" for line in lines).encode()


def _family(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP tridecode:{name} {help}", f"# TYPE tridecode:{name} {kind}"]
