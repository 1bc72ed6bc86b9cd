"""The options of `bench`. Nothing here imports torch."""

import argparse
import math

from ..models.presets import PRESETS
from ..options import OPTIONS
from .command_line import Parser
from .options import Url, add_option, reader
from .values import (
    amount,
    contexts,
    graph_modes,
    percentiles,
    positive,
    positives,
    request_rate,
    row_count,
    row_counts,
    shares_of_one,
    temperature,
    whole,
)

BENCH = """\
Time this engine against a hardware limit that is measured in the same run. The model has the shape of a public model
and random weights, or the weights of a checkpoint. serve times a server through HTTP. Prints a table and, as the last
line, one JSON object. All benches need a GPU except serve without --mix and speculate --texts-only.
docs/benchmarks.md defines the figures.
"""


# Options of `bench serve` without --mix, and with it.
LOAD = (
    *("url", "endpoint", "api_key_file", "timeout", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("warm_up", "seed", "input_tokens", "output_tokens", "jsonl", "temperature", "ignore_eos", "no_ignore_eos"),
    "percentiles",
)
MIX = (
    *("runs", "preset", "quantize", "quantize_head", "kv_dtype", "requests", "context", "prompt_tokens", "steps"),
    *("prompt_ms", "graph"),
)


def add_benches(bench: Parser) -> None:
    """Add a parser for each bench."""
    benches = bench.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Parser)

    def add(name: str, help: str, runs: int | None = None) -> Parser:
        parser = benches.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        if runs is not None:
            parser.add_argument(
                "--runs", type=positive, default=runs, metavar="N", help=f"number of timed runs ({runs})"
            )
        add_output(parser)
        add_verbose(parser)
        return parser

    decode = add("decode", "a decode pass, with LM head and sampling", runs=9)
    add_shape(decode, model=True)
    add_quantize(decode)
    add_steps(decode, "tokens before the first pass")
    decode.add_argument(
        "--ablate",
        action="store_true",
        help="also time the pass without workspace, without graph and without dependent launch",
    )
    batch = add("batch", "a decode pass of many requests at once", runs=9)
    add_shape(batch, model=True)
    add_quantize(batch)
    batch.add_argument(
        "--rows",
        type=row_counts,
        metavar="N,N",
        help="numbers of requests; each gets a row of the table (1,2,4,...,64)",
    )
    batch.add_argument(
        "--context",
        type=contexts,
        default=["64"],
        metavar="N,N",
        help="tokens before the first pass, one row each; 32000x1+64x31: one request at 32,000 and 31 at 64 (64)",
    )
    batch.add_argument("--steps", type=positive, default=128, metavar="N", help="number of passes of a run (128)")
    add_sampling(batch)
    prefill = add("prefill", "time from a prompt to its first token", runs=9)
    add_shape(prefill, model=True)
    add_quantize(prefill)
    prefill.add_argument(
        "--prompt-tokens",
        type=positives,
        default=[2048],
        metavar="N,N",
        help="prompt lengths; each gets a row of the table (2048)",
    )
    cached = "cached tokens before the prompt, as in a second turn (0)"
    prefill.add_argument("--cached", type=whole, default=0, metavar="N", help=cached)
    add_graphs(prefill)
    add_capacity(prefill)
    stream = add("stream", "Engine.stream, compared with replays of the graph", runs=9)
    add_shape(stream, model=True)
    add_quantize(stream)
    add_steps(stream, "prompt tokens")
    add_shape(add("start", "time from the start of a process to its first token", runs=7))
    add_serve(add("serve", "a server with OpenAI's API under load"))
    host = add("offload", "decode passes with K/V or weights in host memory")
    add_kv_on_host(host)
    tokens = "instead: lengths of prompts that are read and continued, a table row each"
    instead = host.add_mutually_exclusive_group()
    instead.add_argument("--prompt-tokens", type=positives, metavar="N,N", help=tokens)
    words = "instead: a conversation of --context tokens whose K/V is copied back from the host, or computed again"
    instead.add_argument("--swap", action="store_true", help=words)
    words = "instead: GiB of the last layers' weights in host memory, with all K/V on the device"
    instead.add_argument("--weights", type=amount, metavar="GIB", help=words)
    words = "GiB of K/V on the device, for --prompt-tokens (4)"
    host.add_argument("--kv-gib", type=amount, default=4.0, metavar="GIB", help=words)
    speculate = add("speculate", "passes that verify drafts, and the tokens per pass on fixed texts", runs=7)
    add_shape(speculate, model=True)
    add_quantize(speculate, kv_dtype=False)  # Drafts need 16-bit K/V.
    words = "numbers of concurrent requests; each gets a row of the table (1,2,4,8,16)"
    speculate.add_argument("--requests", type=row_counts, default=[1, 2, 4, 8, 16], metavar="N,N", help=words)
    first = "tokens before the first pass (1024)"
    speculate.add_argument("--context", type=positive, default=1024, metavar="N", help=first)
    speculate.add_argument("--steps", type=positive, default=32, metavar="N", help="number of passes of a run (32)")
    words = "tokens that the draft kernel searches (32000)"
    speculate.add_argument("--history", type=positive, default=32000, metavar="N", help=words)
    add_option(speculate, OPTIONS["speculate_ngram"])
    words = "tokenizer of the texts (default: the checkpoint's, or the bundled one with a preset)"
    speculate.add_argument("--tokenizer", metavar="DIR", help=words)
    words = "only count tokens per pass on the texts, on any machine, without timing passes"
    speculate.add_argument("--texts-only", action="store_true", help=words)
    pass_options = ("preset", "runs", "requests", "context", "steps", "history", "quantize", "quantize_head")
    speculate.without("texts_only", *pass_options)


def add_output(parser) -> None:
    """Add the options of the output."""
    parser.add_argument(
        "--format",
        choices=["table", "md", "csv", "json", "jsonl"],
        default="table",
        help="format of stdout, or of the file that --output names (table)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the rows to a file in the format of its suffix (.json)")


def add_kv_on_host(host) -> None:
    """Add the options of decode passes with K/V in host memory."""
    host.add_argument("--runs", type=positive, default=5, metavar="N", help="number of timed runs (5)")
    add_shape(host)
    first = "tokens before the first pass (32000)"
    host.add_argument("--context", type=positive, default=32000, metavar="N", help=first)
    host.add_argument(
        "--steps", type=positive, default=16, metavar="N", help="number of passes of a run, and after a prompt (16)"
    )
    shares = "shares of the K/V in host memory; each gets rows of the table (1,0.5,0)"
    host.add_argument("--host", type=shares_of_one, default=[1.0, 0.5, 0.0], metavar="S,S", help=shares)
    host.add_argument(
        "--ring", type=positive, default=2, metavar="N", help="number of staging buffers on the device (2)"
    )


def add_serve(serve: Parser) -> None:
    """Add the options of a load, which use the names of vLLM's benchmark if possible, and the options of --mix."""
    serve.add_argument(
        "--url",
        type=reader(Url()),
        default="http://127.0.0.1:8000",
        help="address of the server (http://127.0.0.1:8000)",
    )
    model = serve.add_mutually_exclusive_group()
    words = "model name on the server (default: the first that it lists); with --mix a checkpoint"
    model.add_argument("--model", metavar="NAME", help=words)
    serve.add_argument(
        "--endpoint",
        choices=["completions", "chat"],
        default="completions",
        help="API endpoint that receives the requests (completions)",
    )
    serve.add_argument(
        "--api-key-file", metavar="FILE", help="file that contains the API key (default: TRIDECODE_API_KEY)"
    )
    serve.add_argument(
        "--timeout", type=amount, default=600.0, metavar="S", help="time limit of a request in seconds (600)"
    )
    group = serve.add_argument_group("load")
    group.add_argument("--num-prompts", type=positive, metavar="N", help="number of requests (100, or all of --jsonl)")
    rate = "requests per second, at random times; inf sends all at once (inf)"
    group.add_argument("--request-rate", type=request_rate, default=math.inf, metavar="R", help=rate)
    burst = "1 is a Poisson process; lower values send bursts, higher values send more evenly (1)"
    group.add_argument("--burstiness", type=amount, default=1.0, metavar="B", help=burst)
    group.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="maximum number of concurrent requests (no limit)"
    )
    group.add_argument(
        "--warm-up",
        type=whole,
        default=1,
        metavar="N",
        help="number of requests before the measurement, not counted (1)",
    )
    group.add_argument(
        "--seed", type=whole, metavar="N", help="seed of the random prompts and arrival times (default: random)"
    )
    group = serve.add_argument_group("prompts", "Random token ids, or random words for --endpoint chat.")
    group.add_argument(
        "--input-tokens", type=positive, default=128, metavar="N", help="length of a prompt in tokens or words (128)"
    )
    group.add_argument(
        "--output-tokens", type=positive, default=128, metavar="N", help="maximum tokens of an answer (128)"
    )
    lines = (
        'prompts from a file, one per line: {"prompt": ...}, {"messages": ...} or {"prompt_ids": ...}, and max_tokens'
    )
    group.add_argument("--jsonl", metavar="FILE", help=f"{lines}; - is stdin")
    group.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="sampling temperature (0)")
    eos = group.add_mutually_exclusive_group()
    eos.add_argument(
        "--ignore-eos", action="store_true", help="let answers reach their maximum length, also with --jsonl"
    )
    eos.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end earlier, for servers without ignore_eos"
    )
    percent = "percentiles of each time, in addition to mean, median and std (99)"
    serve.add_argument("--percentiles", type=percentiles, default=[99], metavar="P,P", help=percent)
    words = "Without a server: an engine in this process on a GPU, with the weights of --model or random weights."
    mix = serve.add_argument_group("a prompt among requests", words)
    words = "time decoding requests while a prompt is read, and the first token of the prompt"
    mix.add_argument("--mix", action="store_true", help=words)
    mix.add_argument("--runs", type=positive, default=9, metavar="N", help="number of timed runs (9)")
    add_preset(model, "with --mix ")
    add_quantize(mix)
    mix.add_argument("--requests", type=row_count, default=8, metavar="N", help="number of decoding requests (8)")
    mix.add_argument(
        "--context", type=positive, default=64, metavar="N", help="prompt tokens of each decoding request (64)"
    )
    tokens = "tokens of the prompt that arrives later (2000)"
    mix.add_argument("--prompt-tokens", type=positive, default=2000, metavar="N", help=tokens)
    mix.add_argument(
        "--steps",
        type=positive,
        default=128,
        metavar="N",
        help="tokens that each request decodes before the prompt arrives (128)",
    )
    add_option(mix, OPTIONS["prompt_ms"])
    add_graphs(mix)
    serve.without("mix", *LOAD)
    serve.within("mix", *MIX)


def add_shape(parser, model: bool = False) -> None:
    """Add --preset, and --model if checkpoints can be measured too."""
    group = parser.add_mutually_exclusive_group()
    add_preset(group)
    if model:
        group.add_argument("--model", metavar="DIR_OR_ID", help="a checkpoint instead of random weights")
    else:
        parser.set_defaults(model=None)


def add_preset(group, when: str = "") -> None:
    """Add --preset. `when` begins its help."""
    words = f"{when}one of {', '.join(PRESETS)}"
    group.add_argument("--preset", metavar="SHAPE", choices=list(PRESETS), default="qwen3-4b", help=words)


def add_quantize(parser, kv_dtype: bool = True) -> None:
    """Add the options of quantization, with --kv-dtype if K/V can be quantized too."""
    for name in ("quantize", "quantize_head", *(["kv_dtype"] if kv_dtype else [])):
        add_option(parser, OPTIONS[name])


def add_steps(parser, context: str, sampling: bool = True) -> None:
    """Add the options of a run of decode passes. `context` is the help of --context."""
    parser.add_argument("--context", type=positive, default=64, metavar="N", help=f"{context} (64)")
    parser.add_argument("--steps", type=positive, default=128, metavar="N", help="number of passes of a run (128)")
    add_capacity(parser)
    if sampling:
        add_sampling(parser)


def add_sampling(parser) -> None:
    """Add --sampling, the kind of sampling that is measured."""
    choices = ["greedy", "temperature", "all"]
    parser.add_argument(
        "--sampling", choices=choices, default="greedy", help="kind of sampling; 'all' enables every filter (greedy)"
    )


def add_graphs(parser) -> None:
    """Add --graph, a list of graph modes."""
    modes = "graph modes, as --graph of generate, a table row each (full)"
    parser.add_argument("--graph", type=graph_modes, default=["full"], metavar="MODE,MODE", help=modes)


def add_capacity(parser) -> None:
    """Add --capacity, the number of K/V positions."""
    parser.add_argument(
        "--capacity", type=positive, metavar="N", help="K/V positions to allocate (default: as the run needs)"
    )


def add_verbose(parser) -> None:
    """Add --verbose after the command.

    Its default is SUPPRESS, because a default would overwrite a --verbose before the command.
    """
    parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
