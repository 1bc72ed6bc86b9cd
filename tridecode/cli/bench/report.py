"""Rows as a table, Markdown, CSV, JSON or JSON lines, and how far two sets of rows lie apart."""

import csv
import io
import json
from collections.abc import Callable

from rich.table import Table

from ...errors import ParameterError, PromptError
from ..inputs import loads, read_bytes
from ..terminal import counted, visible

FORMATS = ("table", "md", "csv", "json", "jsonl")


def name(row: dict) -> str:
    known = [str(row.get("preset") or row.get("model") or "")]
    known += [row["quantize"]] if row.get("quantize") else []
    known += ["K/V in fp8"] if row.get("kv_dtype") == "fp8" else []
    known += {"all": ["all sampling filters"], "temperature": ["temperature"]}.get(row.get("sampling", ""), [])
    return ", ".join(known)


def number(key: str, digits: int = 0, scale: float = 1.0) -> Callable[[dict], str]:
    """The value of `key` with `digits` decimals and thousands apart; nothing where a row has none."""
    return lambda row: "" if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"


def text(key: str) -> Callable[[dict], str]:
    return lambda row: str(row.get(key, ""))


def context(row: dict) -> str:
    """A number, or a mix as it was asked for."""
    return row["context"] if isinstance(row["context"], str) else f"{row['context']:,}"


RATES = {
    "tokens per second": number("tokens_per_second"),
    "GB per step": number("bytes_per_step", 3, 1e-9),
    "read GB/s": number("read_bandwidth_gbs"),
    "% of bandwidth": number("pct_bandwidth", 1),
}
STEP = {"µs per token": number("us_per_token"), "p5": number("us_p5"), "p95": number("us_p95"), **RATES}
# The columns of each kind of row; one that no row fills is left out.
COLUMNS = {
    "decode": {
        "decode": name,
        "context": number("context"),
        **STEP,
        "µs over greedy": number("us_over_greedy", 1),
    },
    "batch": {
        "batch": name,
        "rows": number("rows"),
        "context": context,
        "µs per step": number("us_per_step"),
        "p5": number("us_p5"),
        "p95": number("us_p95"),
        "one row": number("one_row_us"),
        **RATES,
    },
    "ablate": {
        "ablation": text("variant"),
        "shape": name,
        "context": number("context"),
        "µs per step": number("wall_us"),
        "profiled": number("span_us"),
        "GPU compute": number("compute_us"),
        "gap": number("gap_us"),
        "gap %": number("gap_pct", 1),
    },
    "prefill": {
        "prefill": name,
        "prompt tokens": number("prompt_tokens"),
        "cached": lambda row: number("cached")(row) if row.get("cached") else "",
        "graph": text("graph"),
        "read by": text("reads"),
        "ms": number("prefill_ms", 2),
        "p5": number("prefill_ms_p5", 2),
        "p95": number("prefill_ms_p95", 2),
        "ms to first token": number("ttft_ms", 2),
        "TFLOP": number("flops", 2, 1e-12),
        "matmul TFLOP/s": number("matmul_tflops"),
        "% of matmul rate": number("pct_matmul", 1),
    },
    "stream": {
        "stream": name,
        "context": number("context"),
        "µs per token": number("us_per_token"),
        "graph alone": number("graph_us_per_token"),
        "ratio": number("ratio_to_graph", 3),
        "ms to first token": number("ttft_ms", 2),
        "between tokens: mean": number("itl_mean_us"),
        "median": number("itl_median_us"),
        "p99": number("itl_p99_us"),
    },
    "start": {
        "start": name,
        "first start, s": number("first_start_s", 1),
        "later start, s": number("second_start_s", 1),
        "import": number("import_s", 1),
        "build": number("build_s", 1),
        "prompt": number("prompt_s", 1),
        "kernels compiled at first": number("first_start_kernels_compiled"),
    },
    "serve": {
        "serve": text("model_id"),
        "requests": number("num_prompts"),
        "failed": number("failed"),
        "per second": text("request_rate"),
        "at most": number("max_concurrency"),
        "requests/s": number("request_throughput", 2),
        "output tok/s": number("output_throughput"),
        "all tok/s": number("total_token_throughput"),
        "TTFT ms": number("mean_ttft_ms", 2),
        "p99": number("p99_ttft_ms", 2),
        "TPOT ms": number("mean_tpot_ms", 2),
        "ITL ms": number("mean_itl_ms", 2),
        "p99 ITL": number("p99_itl_ms", 2),
        "E2EL ms": number("mean_e2el_ms"),
    },
    "serve-mix": {
        "a prompt among requests": name,
        "requests": number("requests"),
        "prompt tokens": number("prompt_tokens"),
        "graph": text("graph"),
        "read by": text("reads"),
        **{
            f"{phase}: {figure}": number(f"{phase}_{figure}_ms", 2)
            for phase in ("before", "during", "after")
            for figure in ("median", "p99", "max")
        },
        "lost": number("lost"),
        "ms to first token": number("ttft_ms", 2),
    },
    "offload": {
        "way": text("variant"),
        "shape": name,
        "context": number("context"),
        "on the host": number("host", 2),
        "µs per token": number("us_per_token"),
        "p5": number("us_p5"),
        "p95": number("us_p95"),
        "PCIe GB/s": number("pcie_gbs", 1),
        "fetch alone": number("fetch_gbs", 1),
        "page copies alone": number("copy_gbs", 1),
        "% of fetch": number("pct_fetch", 1),
        "to the bytes' time": number("over_needed", 3),
        "graphs": number("captures"),
    },
    "offload-weights": {
        "way": text("variant"),
        "shape": name,
        "context": number("context"),
        "layers on the host": number("host_layers"),
        "GB a token": number("host_bytes", 2, 1e-9),
        "µs per token": number("us_per_token"),
        "p5": number("us_p5"),
        "p95": number("us_p95"),
        "PCIe GB/s": number("pcie_gbs", 1),
        "fetch alone": number("fetch_gbs", 1),
        "% of fetch": number("pct_fetch", 1),
        "to the bytes' time": number("over_needed", 3),
        "graphs": number("captures"),
    },
    "offload-prompt": {
        "a long prompt": name,
        "prompt tokens": number("prompt_tokens"),
        "K/V GiB of the device": number("kv_gib", 1),
        "pages there": number("device_pages"),
        "on the host": number("host_pages"),
        "s to first token": number("ttft_s", 2),
        "prompt tok/s": number("prompt_tokens_per_second"),
        "µs per token after it": number("us_per_token"),
        "GiB allocated": number("allocated_gib", 2),
    },
    "offload-swap": {
        "a conversation comes back": name,
        "context": number("context"),
        "from the host, ms": number("back_ms", 1),
        "computed again, ms": number("anew_ms", 1),
        "ratio": number("ratio", 1),
        "GB/s, out and in": number("both_ways_gbs", 1),
    },
    "speculate": {
        "requests": text("variant"),
        "shape": name,
        "context": number("context"),
        "µs a pass without": number("off_us"),
        **{
            column: figure
            for rows in (1, 2, 4, 8)
            for column, figure in {
                f"{counted(rows, 'row')} of each": number(f"us_{rows}"),
                f"{rows}: ratio": number(f"ratio_{rows}", 3),
            }.items()
        },
    },
    "speculate-draft": {
        "looking for a draft": name,
        "tokens before": number("history"),
        "µs": number("draft_us", 2),
    },
    "speculate-text": {
        "text": text("variant"),
        "from": text("source"),
        "licence": text("licence"),
        "tokens": number("tokens"),
        "tokens a pass": number("tokens_per_pass", 2),
        **{f"passes of {rows}": number(f"passes_{rows}") for rows in (1, 2, 4, 8)},
        "speed-up": number("speed_up", 2),
    },
    "peers": {"program": text("variant"), "shape": name, "context": number("context"), **STEP},
}
# The figures of which two runs are compared.
COMPARED = {
    "decode": ("us_per_token",),
    "batch": ("us_per_step",),
    "ablate": ("wall_us",),
    "prefill": ("prefill_ms", "ttft_ms"),
    "stream": ("us_per_token", "graph_us_per_token"),
    "start": ("first_start_s", "second_start_s"),
    "serve": ("output_throughput", "mean_ttft_ms", "mean_tpot_ms"),
    "serve-mix": ("before_median_ms", "during_p99_ms", "after_median_ms", "ttft_ms"),
    "offload": ("us_per_token",),
    "offload-weights": ("us_per_token",),
    "offload-prompt": ("ttft_s", "us_per_token"),
    "offload-swap": ("back_ms", "anew_ms"),
    "speculate": ("off_us", "us_1", "us_2", "us_4", "us_8"),
    "speculate-draft": ("draft_us",),
    "speculate-text": ("tokens_per_pass", "speed_up"),
    "peers": ("us_per_token",),
}

# The lines of vLLM's benchmark: label, figure and its form; those of SERVED_IF where there is a limit.
SERVED = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Total Token throughput (tok/s):", "total_token_throughput", ".2f"),
)
SERVED_IF = ("max_concurrency", "request_rate")
TIMES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def tables(rows: list[dict]) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and cells for each kind of row that there is."""
    found = []
    for kind, columns in COLUMNS.items():
        cells = [[show(row) for show in columns.values()] for row in rows if row["bench"] == kind]
        filled = [i for i in range(len(columns)) if any(line[i] for line in cells)]
        if cells:
            found.append(([list(columns)[i] for i in filled], [[line[i] for i in filled] for line in cells]))
    return found


def caption(rows: list[dict]) -> str:
    """The GPUs and versions behind the rows, each once."""
    keys = ("gpu", "dtype", "tridecode", "torch", "triton", "transformers")
    return "; ".join(
        dict.fromkeys(
            ", ".join(f"{row[key]}" if key in ("gpu", "dtype") else f"{key} {row[key]}" for key in keys if key in row)
            for row in rows
        )
    )


def render(rows: list[dict], form: str) -> str:
    """The rows as text in one of FORMATS but table; ends with a newline."""
    if form == "md":
        return "\n".join(markdown_table(*table) for table in tables(rows))
    if form == "csv":
        names = list(dict.fromkeys(key for row in rows for key in row))
        sink = io.StringIO()
        writer = csv.DictWriter(sink, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return sink.getvalue()
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    return "".join(json.dumps(row) + "\n" for row in rows)


def markdown_table(headers: list[str], cells: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in line] for line in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(rows: list[dict], output) -> None:
    """Tables for people, then one JSON object as the last line of stdout: the row, or all of them as `rows`."""
    if not output.tty:
        output.console.width = 160  # a pipe has none of its own
    alone = len(rows) == 1 and rows[0]["bench"] == "serve"
    if alone:
        output.text(console_form(rows[0], output.console.width))
    for headers, cells in [] if alone else tables(rows):
        table = Table()
        for i, header in enumerate(headers):
            table.add_column(header, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for line in cells:
            table.add_row(*map(visible, line))
        output.console.print(table)
    output.console.print(visible(caption(rows)), soft_wrap=True)
    output.text(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}) + "\n")


def console_form(row: dict, columns: int) -> str:
    """A row of bench serve as vLLM's benchmark prints it, for a terminal of that many columns, 40 or more."""
    width = min(max(columns, 40), 50)

    def line(label: str, key: str, form: str) -> str:
        value = row.get(key)
        shown = "-" if value is None else value if isinstance(value, str) else format(value, form)
        return f"{label:<{width - 10}} {shown}"

    lines = [" Serving Benchmark Result ".center(width, "=")]
    lines += [line(*each) for each in SERVED if each[1] not in SERVED_IF or row.get(each[1]) not in (None, "inf")]
    for name, (short, title) in TIMES.items():
        lines.append(title.center(width, "-"))
        for key in row:
            if key.endswith(f"_{name}_ms") and not key.startswith("std"):
                lines.append(line(f"{key.split('_')[0].capitalize()} {short} (ms):", key, ".2f"))
    return "\n".join([*lines, "=" * width, ""])


def read_rows(path: str) -> list[dict]:
    """The rows of a JSON file that a bench wrote; PromptError or ParameterError when it is none."""
    try:
        rows = loads(read_bytes(path, None, "a JSON file that a bench wrote"))
        known = isinstance(rows, list) and rows and all(row["bench"] in COLUMNS for row in rows)
        known and tables(rows)  # figures that are none
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, PromptError):
            raise
        known = False
    if not known:
        raise ParameterError(f"{path}: expected a JSON list of rows that a bench wrote with --format json")
    return rows


def deviations(rows: list[dict], earlier: list[dict]) -> list[tuple[str, str, float]]:
    """For each row that `earlier` has too: its command, and the figure that changed most with its change in percent."""
    before = {identity(row): row for row in earlier}
    found = []
    for row in rows:
        other = before.get(identity(row), {})
        changes = {
            key: 100 * (row[key] / other[key] - 1)
            for key in COMPARED[row["bench"]]
            if row.get(key) is not None and other.get(key)
        }
        if changes:
            worst = max(changes, key=lambda key: abs(changes[key]))
            found.append((row["command"], worst, changes[worst]))
    return found


def identity(row: dict) -> tuple:
    return row.get("command"), row.get("variant")
