"""Time of the ops of hybrid models: gated delta net layers, and attention of prompts with heads of 256. GPU only.

    python -m benchmarks.delta
    python -m benchmarks.delta decode --requests 1,8 --config num_warps=4 --config num_warps=8,batch=1
    python -m benchmarks.delta prompt attention --tokens 2048 --output rows.json

decode: delta_decode, in a chain of dependent launches as in a decode pass. Each pass continues the texts of the pass
before it; --accepted is the number of drafts that it accepts.

prompt: delta_conv, delta_chunks, delta_scan and gated_norm, each in a graph of its own, and all of them one after the
other, as in a prompt pass ("layer"). Fields of --config are prefixed: chunks.num_warps=8,scan.block_v=64.

attention: attention of a prompt by Triton, and by torch ("flash").

A captured graph launches an op for several layers, each with its own weights, records, K/V and activations of prompts,
which together are larger than the L2 cache. The time is the median of replays by CUDA events, divided by the layers.
The limit is the time that the bytes of the launch need at the read bandwidth, which is measured in the same run. Each
--config is measured in addition to the config that an engine chooses. A table goes to stdout, JSON to --output.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tridecode import layout
from tridecode.cli.bench.measure import need_gpu
from tridecode.cli.bench.read import measure_read_bandwidth
from tridecode.cli.bench.timing import captured, time_runs
from tridecode.kernels.attention.arguments import Heads, KVLayer, Scratch
from tridecode.kernels.attention.prompt_attention import PROMPT_ATTENTION, scratch_sizes
from tridecode.kernels.attention.torch_attention import torch_attention
from tridecode.kernels.delta.arguments import RING, DeltaHeads, DeltaWeights, DraftRows, RecordLayer
from tridecode.kernels.delta.delta_chunks import DELTA_CHUNKS
from tridecode.kernels.delta.delta_conv import DELTA_CONV
from tridecode.kernels.delta.delta_decode import DELTA_DECODE
from tridecode.kernels.delta.delta_scan import DELTA_SCAN
from tridecode.kernels.delta.gated_norm import GATED_NORM
from tridecode.kernels.delta.prompt_tables import PromptTables
from tridecode.kernels.device import device_of
from tridecode.kernels.linear.project import Normed
from tridecode.layout import Chunk
from tridecode.tuning.attention import prompt_attention_config
from tridecode.tuning.delta import delta_config, delta_prompt_configs

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
HIDDEN = {16: 1024, 32: 2560, 48: 5120}  # V heads -> hidden size of Qwen3.5-0.8B, 4B and 27B.
ATTENTION = Heads(query=16, kv=4, dim=256, scale=256**-0.5, window=0)  # The heads of Qwen3.5-4B.
PAGE = 64
# Minimum number of layers of a graph, and their minimum bytes: five times the L2 cache, so that no data stay in it.
LAYERS, COLD = 8, 2**28
PARTIALS = 160  # Number of partial sums of squares of a row.
START = 100  # Position of the first pass.
REPLAYS = 15


@dataclass(frozen=True)
class Case:
    """An op with sizes and a launch config.

    Args:
        launches: the launch of each layer.
        nbytes: bytes that one launch moves, or 0 if unknown.
        flops: floating point operations of one launch, or 0 if unknown.
        prepare: called before the first launch.
    """

    op: str
    sizes: dict[str, int]
    config: str
    launches: list[Callable[[], Any]]
    nbytes: int = 0
    flops: int = 0
    prepare: Callable[[], Any] | None = None

    def measure(self) -> float:
        """Return the median time of a launch in seconds."""
        if self.prepare:
            self.prepare()

        def launch_all() -> None:
            for launch in self.launches:
                launch()

        return statistics.median(time_runs(captured(DEVICE, launch_all), REPLAYS)) / len(self.launches)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=BF16, device=DEVICE)


def table(rows: int, *values: tuple[int, ...]) -> torch.Tensor:
    """Return an int32 tensor of `rows` rows: first `values`, then zeros."""
    first = torch.tensor(values, dtype=torch.int32)
    return torch.cat([first, first.new_zeros(rows - len(values), first.shape[1])]).to(DEVICE)


def layers_of(nbytes: int) -> int:
    """Return the number of layers of a graph, if each has `nbytes` bytes."""
    return max(LAYERS, -(-COLD // nbytes))


def delta_weights(heads: DeltaHeads) -> DeltaWeights:
    hidden = HIDDEN[heads.value]
    return DeltaWeights(
        random(1, 4, heads.channels, dtype=BF16, scale=0.5).movedim(-1, 0),
        random(heads.value, hidden, dtype=BF16, scale=hidden**-0.5),
        random(heads.value, hidden, dtype=BF16, scale=hidden**-0.5),
        random(heads.value),
        random(heads.value) - 3.0,
        random(heads.value_dim) + 1.0,
    )


def delta_records(heads: DeltaHeads, count: int) -> RecordLayer:
    return RecordLayer(
        random(count, heads.value, heads.key_dim, heads.value_dim, scale=0.3),
        random(count, RING, heads.channels, dtype=BF16),
        torch.full((count, heads.value), START, dtype=torch.int32, device=DEVICE),
    )


def text_of(changes: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items()) or "default"


def delta_heads(args, default: list[int]) -> list[DeltaHeads]:
    return [DeltaHeads(16, value, 128, 128, 1e-6) for value in args.heads or default]


def decode(args) -> Iterator[Case]:
    """Yield the cases of delta_decode."""
    for heads in delta_heads(args, [32, 48]):
        for requests in args.requests:
            for queries in args.queries:
                yield from decode_of(heads, requests, queries, args.accepted, args.config)


def decode_of(heads: DeltaHeads, requests: int, queries: int, accepted: int, configs) -> Iterator[Case]:
    rows = torch.arange(requests * queries, device=DEVICE)
    meta = torch.zeros(len(rows), layout.META_WIDTH, dtype=torch.int32, device=DEVICE)
    meta[:, layout.STATUS] = layout.RUN
    meta[:, layout.SLOT] = meta[:, layout.RECORD] = rows // queries
    x = random(len(rows), HIDDEN[heads.value], dtype=BF16)
    qkvz = random(len(rows), heads.channels + heads.value_size)
    norm = Normed(random(len(rows), PARTIALS).abs(), PARTIALS, 1e-6)
    layers = []
    for _ in range(layers_of(4 * requests * heads.value * heads.key_dim * heads.value_dim)):
        out, records = empty(len(rows), heads.value_size), delta_records(heads, requests)
        drafts = DraftRows(
            random(requests, RING, heads.key, heads.key_dim, scale=0.1),
            random(requests, RING, heads.value, heads.value_dim),
            -random(requests, RING, heads.value).abs(),
        )
        drafts = drafts if queries > 1 else None
        layers.append((meta, qkvz, x, norm, out, delta_weights(heads), records, drafts, heads))
    nbytes = DELTA_DECODE.bytes(*layers[0])
    dependent = torch.cuda.get_device_capability() >= (9, 0)

    def prepare() -> None:
        meta[:, layout.POSITION] = START + rows % queries
        for layer in layers:
            layer[6].covered.fill_(START)

    def first(config) -> None:
        """Launch the first layer of the next pass. At a position that records cover, they would only be read."""
        meta[:, layout.POSITION].add_(1 + accepted)
        DELTA_DECODE.launch(*layers[0], config=config)

    sizes = dict(heads=heads.value, requests=requests, queries=queries)
    for changes in configs:
        config = replace(delta_config(queries), **changes)
        others = [partial(DELTA_DECODE.launch, *layer, config=config, pdl=dependent) for layer in layers[1:]]
        launches = [partial(first, config), *others]
        yield Case("delta_decode", sizes, text_of(changes), launches, nbytes, prepare=prepare)


def prompt(args) -> Iterator[Case]:
    """Yield the cases of the ops of a gated delta net layer in prompt passes."""
    for heads in delta_heads(args, [32]):
        for tokens in args.tokens or [64, 512, 2048]:
            yield from prompt_of(heads, tokens, args.config)


def prompt_of(heads: DeltaHeads, tokens: int, configs) -> Iterator[Case]:
    tables = PromptTables(
        table(layout.MAX_CHUNKS, Chunk(0, 0, tokens, 0)),
        table(layout.MAX_CHUNKS, (0, 1)),
        table(layout.MAX_SNAPSHOTS, (0,) * layout.SNAPSHOT_WIDTH),
    )
    ops = dict(delta_conv=DELTA_CONV, delta_chunks=DELTA_CHUNKS, delta_scan=DELTA_SCAN, gated_norm=GATED_NORM)
    layers = []
    for _ in range(layers_of(2 * tokens * (2 * heads.channels + 3 * heads.value_size))):
        qkvz, mixed = random(tokens, heads.channels + heads.value_size, dtype=BF16), empty(tokens, heads.channels)
        b, a = random(tokens, heads.value, dtype=BF16), random(tokens, heads.value, dtype=BF16)
        rates = torch.empty(tokens, 2, heads.value, device=DEVICE)
        u, w, out = (empty(tokens, heads.value_size) for _ in range(3))
        p = empty(tokens, heads.value * layout.SCAN)
        weights, records = delta_weights(heads), delta_records(heads, 2)
        layers.append(
            dict(
                delta_conv=(tables, qkvz, b, a, mixed, rates, weights, records, heads),
                delta_chunks=(tables.chunks, mixed, rates, u, w, p, heads),
                delta_scan=(tables, mixed, rates, u, w, p, records, heads),
                gated_norm=(tables.chunks, u, qkvz, out, weights.norm, heads),
            )
        )
    default = dict(zip(("delta_chunks", "delta_scan"), delta_prompt_configs(device_of(DEVICE))))
    sizes, measured = dict(heads=heads.value, tokens=tokens), set()
    for changes in configs:
        chosen = dict(default)
        for name, value in changes.items():
            op, field = name.split(".")
            chosen[f"delta_{op}"] = replace(chosen[f"delta_{op}"], **{field: value})
        launches: dict[str, list] = {}
        for name, op in ops.items():
            more = {"config": chosen[name]} if name in chosen else {}
            launches[name] = [partial(op.launch, *layer[name], **more) for layer in layers]
            if (name, *more.values()) not in measured:
                measured.add((name, *more.values()))
                yield Case(name, sizes, text_of(changes), launches[name], op.bytes(*layers[0][name]))
        yield Case("layer", sizes, text_of(changes), [partial(call_all, each) for each in zip(*launches.values())])


def call_all(functions) -> None:
    for function in functions:
        function()


def attention(args) -> Iterator[Case]:
    """Yield the cases of attention of a prompt."""
    for tokens in args.tokens or [512, 2048]:
        yield from attention_of(ATTENTION, tokens, args.config)


def attention_of(heads: Heads, tokens: int, configs) -> Iterator[Case]:
    chunk, pages, layers = Chunk(0, 0, tokens, 0), -(-tokens // PAGE), []
    chunks = table(layout.MAX_CHUNKS, chunk)
    for _ in range(layers_of(4 * tokens * heads.dim * (heads.query + heads.kv))):
        pool = random(pages, 2, heads.kv, PAGE, heads.dim, dtype=BF16)
        kv = KVLayer(torch.randperm(pages, device=DEVICE).int()[None], *pool.unbind(1))
        q, out = random(tokens, heads.query, heads.dim, dtype=BF16), empty(tokens, heads.query * heads.dim)
        layers.append((chunks, q, out, kv))
    default, unused = (
        prompt_attention_config(device_of(DEVICE), False, head_dim=heads.dim),
        Scratch(chunks, chunks, chunks),
    )
    nbytes, flops = (
        PROMPT_ATTENTION.bytes(*layers[0], unused, heads),
        2 * tokens * (tokens + 1) * heads.query * heads.dim,
    )
    flash = torch_attention("flash", [chunk])
    launches = [partial(flash.launch, *layer, unused, heads) for layer in layers]
    yield Case("attention by flash", dict(tokens=tokens), "", launches, nbytes, flops)
    for changes in configs:
        config = replace(default, **changes)
        partials, lse, counter = (
            torch.zeros(size, device=DEVICE) for size in scratch_sizes(heads.dim, config).values()
        )
        more = Scratch(partials, lse, counter.int()), heads
        launches = [partial(PROMPT_ATTENTION.launch, *layer, *more, config=config) for layer in layers]
        yield Case("prompt_attention", dict(tokens=tokens), text_of(changes), launches, nbytes, flops)


KINDS = {"decode": decode, "prompt": prompt, "attention": attention}


def measured(case: Case, bandwidth: float) -> dict:
    """Return the row of a case."""
    row = dict(op=case.op, **case.sizes, config=case.config)
    try:
        seconds = case.measure()
    except Exception as error:  # The GPU does not support this config, but may support others.
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"}
    row["us"] = round(1e6 * seconds, 2)
    if case.nbytes:
        row["limit_us"] = round(1e6 * case.nbytes / bandwidth, 2)
    if case.flops:
        row["tflops"] = round(case.flops / seconds / 1e12, 1)
    return row


def line_of(row: dict) -> str:
    """Return the line of the table."""
    sizes = " ".join(f"{name}={row[name]}" for name in ("heads", "requests", "queries", "tokens") if name in row)
    figures = "".join(
        f"{row[name]:10,.2f} {unit}"
        for name, unit in (("us", "us"), ("limit_us", "us limit"), ("tflops", "TFLOP/s"))
        if name in row
    )
    return f"{row['op']:19}{sizes:31}{row['config']:36}{row.get('error', figures)}"


def changes_of(text: str) -> dict[str, int]:
    """Return the fields of --config."""
    try:
        return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        expected = "fields of a launch config, such as num_warps=4,batch=1"
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}") from None


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kinds", nargs="*", metavar="KIND", help=f"kinds of ops to time: {', '.join(KINDS)} (default: all)")
    add(
        "--heads",
        type=numbers,
        metavar="N,N",
        help="numbers of V heads of a layer: 16, 32 or 48 (default: 32,48 for decode, 32 for prompt)",
    )
    add(
        "--requests",
        type=numbers,
        default=[1, 8, 64],
        metavar="N,N",
        help="numbers of requests in a decode pass (default: 1,8,64)",
    )
    add("--queries", type=numbers, default=[1, 4], metavar="N,N", help="numbers of rows per request (default: 1,4)")
    add(
        "--accepted",
        type=int,
        default=0,
        metavar="N",
        help="number of drafts that each pass accepts, less than --queries (default: 0)",
    )
    add(
        "--tokens",
        type=numbers,
        metavar="N,N",
        help="prompt lengths in tokens (default: 512,2048 for attention, 64,512,2048 otherwise)",
    )
    add(
        "--config",
        type=changes_of,
        action="append",
        default=[{}],
        metavar="NAME=N,...",
        help="fields that replace those of the default launch config; may be repeated",
    )
    add(
        "--output",
        default=f"{os.environ.get('OUT', '.')}/delta.json",
        metavar="FILE",
        help="JSON file to write (default: $OUT/delta.json)",
    )
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"unknown kind {', '.join(unknown)}; expected {', '.join(KINDS)}")
    need_gpu()
    bandwidth, rows = measure_read_bandwidth(DEVICE, 2**32), []
    facts = dict(gpu=torch.cuda.get_device_name(), read_gb_s=round(bandwidth / 1e9), torch=torch.__version__)
    print(f"{facts['gpu']}, read bandwidth {facts['read_gb_s']:,} GB/s", flush=True)
    for kind in args.kinds or KINDS:
        for case in KINDS[kind](args):
            rows.append(measured(case, bandwidth))
            print(line_of(rows[-1]), flush=True)
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump(facts | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
