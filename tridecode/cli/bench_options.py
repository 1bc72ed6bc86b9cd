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
Time this engine with random weights in the shape of a public model (or with a checkpoint's), against a limit measured
in the same run; serve times a server through HTTP. Prints a table and, as the last line, one JSON object. All but
serve without --mix and speculate --texts-only need a GPU. docs/benchmarks.md defines the figures.
"""


# Options of `bench serve` for a load, and for --mix.
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
            parser.add_argument("--runs", type=positive, default=runs, metavar="N", help=f"runs that count ({runs})")
        add_output(parser)
        add_verbose(parser)
        return parser

    decode = add("decode", "the token step, LM head and sampling included", runs=9)
    add_shape(decode, model=True)
    add_quantize(decode)
    add_steps(decode, "tokens before the first step")
    decode.add_argument(
        "--ablate", action="store_true", help="the same step without its ideas: workspace, graph, dependent launch"
    )
    batch = add("batch", "the token step of many requests at once", runs=9)
    add_shape(batch, model=True)
    add_quantize(batch)
    batch.add_argument("--rows", type=row_counts, metavar="N,N", help="requests at once, a row each (1,2,4,...,64)")
    batch.add_argument(
        "--context",
        type=contexts,
        default=["64"],
        metavar="N,N",
        help="tokens before the first step, a row each; 32000x1+64x31 is one request at 32,000 beside 31 at 64 (64)",
    )
    batch.add_argument("--steps", type=positive, default=128, metavar="N", help="steps a run (128)")
    add_sampling(batch)
    prefill = add("prefill", "a prompt to its first token", runs=9)
    add_shape(prefill, model=True)
    add_quantize(prefill)
    prefill.add_argument(
        "--prompt-tokens", type=positives, default=[2048], metavar="N,N", help="lengths, a row each (2048)"
    )
    cached = "tokens before them that the cache holds already, as in a second turn (0)"
    prefill.add_argument("--cached", type=whole, default=0, metavar="N", help=cached)
    add_graphs(prefill)
    add_capacity(prefill)
    stream = add("stream", "the stream as its caller sees it, and the graph alone", runs=9)
    add_shape(stream, model=True)
    add_quantize(stream)
    add_steps(stream, "prompt tokens")
    add_shape(add("start", "a process from its start to the first token", runs=7))
    add_serve(add("serve", "a server through HTTP, this one or any with the OpenAI API, under load"))
    host = add("offload", "the token step with K/V or weights in host memory, in several ways")
    add_kv_on_host(host)
    tokens = "of a prompt to read instead, and to go on with, a row each"
    instead = host.add_mutually_exclusive_group()
    instead.add_argument("--prompt-tokens", type=positives, metavar="N,N", help=tokens)
    words = "instead: a conversation of --context tokens that comes back from the host, and one computed again"
    instead.add_argument("--swap", action="store_true", help=words)
    words = "instead: GiB of the last layers' weights on the host, and all K/V on the device"
    instead.add_argument("--weights", type=amount, metavar="GIB", help=words)
    words = "of the device, for --prompt-tokens (4)"
    host.add_argument("--kv-gib", type=amount, default=4.0, metavar="GIB", help=words)
    guess = add("speculate", "passes that verify guesses, and the tokens that come out of one on real texts", runs=7)
    add_shape(guess, model=True)
    add_quantize(guess, kv_dtype=False)  # K/V in 8 bits are not verified
    most = "at a time, a row each (1,2,4,8,16)"
    guess.add_argument("--requests", type=row_counts, default=[1, 2, 4, 8, 16], metavar="N,N", help=most)
    first = "tokens before the first pass (1024)"
    guess.add_argument("--context", type=positive, default=1024, metavar="N", help=first)
    guess.add_argument("--steps", type=positive, default=32, metavar="N", help="passes a run (32)")
    long = "tokens that are looked through for a guess (32000)"
    guess.add_argument("--history", type=positive, default=32000, metavar="N", help=long)
    add_option(guess, OPTIONS["speculate_ngram"])
    words = "of the texts (default: the checkpoint's, of a preset the bundled one)"
    guess.add_argument("--tokenizer", metavar="DIR", help=words)
    words = "play the texts alone, on any machine; no pass is timed"
    guess.add_argument("--texts-only", action="store_true", help=words)
    of_passes = ("preset", "runs", "requests", "context", "steps", "history", "quantize", "quantize_head")
    guess.without("texts_only", *of_passes)


def add_output(parser) -> None:
    """Add the options of where the rows go."""
    parser.add_argument(
        "--format",
        choices=["table", "md", "csv", "json", "jsonl"],
        default="table",
        help="of stdout, or of the file with --output (table)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the rows there, in the format of its suffix (.json)")


def add_kv_on_host(host) -> None:
    """Add the options of steps with K/V in host memory."""
    host.add_argument("--runs", type=positive, default=5, metavar="N", help="runs that count (5)")
    add_shape(host)
    first = "tokens before the first step (32000)"
    host.add_argument("--context", type=positive, default=32000, metavar="N", help=first)
    host.add_argument("--steps", type=positive, default=16, metavar="N", help="steps a run, or after a prompt (16)")
    shares = "of the K/V on the host, a row each in each way (1,0.5,0)"
    host.add_argument("--host", type=shares_of_one, default=[1.0, 0.5, 0.0], metavar="S,S", help=shares)
    host.add_argument("--ring", type=positive, default=2, metavar="N", help="buffers of the device (2)")


def add_serve(serve: Parser) -> None:
    """Add the options of a load, with the names of vLLM's benchmark if it has them, and the options of --mix."""
    serve.add_argument("--url", type=reader(Url()), default="http://127.0.0.1:8000", help="(http://127.0.0.1:8000)")
    model = serve.add_mutually_exclusive_group()
    words = "as the server calls it (default: the first that it names); with --mix a checkpoint"
    model.add_argument("--model", metavar="NAME", help=words)
    serve.add_argument("--endpoint", choices=["completions", "chat"], default="completions", help="(completions)")
    serve.add_argument("--api-key-file", metavar="FILE", help="one line; without it TRIDECODE_API_KEY, if set")
    serve.add_argument("--timeout", type=amount, default=600.0, metavar="S", help="for a whole request (600)")
    group = serve.add_argument_group("load")
    group.add_argument("--num-prompts", type=positive, metavar="N", help="requests (100, or all of --jsonl)")
    rate = "requests begun a second, at random times, or inf: at once (inf)"
    group.add_argument("--request-rate", type=request_rate, default=math.inf, metavar="R", help=rate)
    burst = "of these times; 1 is a Poisson process, less comes in bursts, more is more even (1)"
    group.add_argument("--burstiness", type=amount, default=1.0, metavar="B", help=burst)
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="requests under way at most (no limit)")
    group.add_argument("--warm-up", type=whole, default=1, metavar="N", help="requests before, not counted (1)")
    group.add_argument("--seed", type=whole, metavar="N", help="of prompts and times (default: another each time)")
    group = serve.add_argument_group("prompts", "Random token ids; for --endpoint chat random words.")
    group.add_argument("--input-tokens", type=positive, default=128, metavar="N", help="or words, of a prompt (128)")
    group.add_argument("--output-tokens", type=positive, default=128, metavar="N", help="of an answer at most (128)")
    lines = 'prompts instead, a line each: {"prompt": ...}, {"messages": ...} or {"prompt_ids": ...}, also max_tokens'
    group.add_argument("--jsonl", metavar="FILE", help=f"{lines}; - is stdin")
    group.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="(0)")
    eos = group.add_mutually_exclusive_group()
    eos.add_argument("--ignore-eos", action="store_true", help="answers end at their length only, with --jsonl too")
    eos.add_argument("--no-ignore-eos", action="store_true", help="they may; for servers that know no ignore_eos")
    percent = "of each time, beside mean, median and std (99)"
    serve.add_argument("--percentiles", type=percentiles, default=[99], metavar="P,P", help=percent)
    words = "No server: an engine of this process on a GPU, with the weights of --model or random ones."
    mix = serve.add_argument_group("a prompt among requests", words)
    words = "time requests that decode while a prompt comes among them, and the prompt"
    mix.add_argument("--mix", action="store_true", help=words)
    mix.add_argument("--runs", type=positive, default=9, metavar="N", help="runs that count (9)")
    add_preset(model, "with --mix ")
    add_quantize(mix)
    mix.add_argument("--requests", type=row_count, default=8, metavar="N", help="that decode (8)")
    mix.add_argument("--context", type=positive, default=64, metavar="N", help="tokens of their prompts (64)")
    tokens = "of the prompt that comes (2000)"
    mix.add_argument("--prompt-tokens", type=positive, default=2000, metavar="N", help=tokens)
    mix.add_argument("--steps", type=positive, default=128, metavar="N", help="tokens of each before it comes (128)")
    add_option(mix, OPTIONS["prompt_ms"])
    add_graphs(mix)
    serve.without("mix", *LOAD)
    serve.within("mix", *MIX)


def add_shape(parser, model: bool = False) -> None:
    group = parser.add_mutually_exclusive_group()
    add_preset(group)
    if model:
        group.add_argument("--model", metavar="DIR_OR_ID", help="a checkpoint instead of random weights")
    else:
        parser.set_defaults(model=None)


def add_preset(group, when: str = "") -> None:
    words = f"{when}one of {', '.join(PRESETS)}"
    group.add_argument("--preset", metavar="SHAPE", choices=list(PRESETS), default="qwen3-4b", help=words)


def add_quantize(parser, kv_dtype: bool = True) -> None:
    for name in ("quantize", "quantize_head", *(["kv_dtype"] if kv_dtype else [])):
        add_option(parser, OPTIONS[name])


def add_steps(parser, context: str, sampling: bool = True) -> None:
    parser.add_argument("--context", type=positive, default=64, metavar="N", help=f"{context} (64)")
    parser.add_argument("--steps", type=positive, default=128, metavar="N", help="steps a run (128)")
    add_capacity(parser)
    if sampling:
        add_sampling(parser)


def add_sampling(parser) -> None:
    choices = ["greedy", "temperature", "all"]
    parser.add_argument("--sampling", choices=choices, default="greedy", help="all: every filter on")


def add_graphs(parser) -> None:
    modes = "how passes run, a row each, all on one set of weights; as --graph of generate (full)"
    parser.add_argument("--graph", type=graph_modes, default=["full"], metavar="MODE,MODE", help=modes)


def add_capacity(parser) -> None:
    parser.add_argument("--capacity", type=positive, metavar="N", help="K/V positions to allocate (what the run needs)")


def add_verbose(parser) -> None:
    """--verbose after the command too. SUPPRESS: its default must not overwrite one given before the command."""
    parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
