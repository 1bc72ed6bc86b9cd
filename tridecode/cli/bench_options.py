"""The options of bench, profile and tune, each declared once. Nothing here imports torch."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..arguments import Choice, Constraint, Flag, Integer, Number, Option, Rejected, Several
from ..models.presets import GGUF_TYPES, PRESETS
from ..options import DEFAULT_RANK, GRAPHS, MAX_RANK, MAX_SLOTS, OPTIONS
from .command_line import Parser
from .options import ANY, Url

BENCH = """\
Time this engine against a hardware limit that is measured in the same run. The model has the shape of a public model
and random weights, or the weights of a checkpoint. serve times a server through HTTP. Prints a table and, as the last
line, one JSON object. All benches need a GPU except serve without --mix and speculate --texts-only.
docs/benchmarks.md defines the figures.
"""
BENCHES = {  # Name -> what it measures.
    "decode": "a decode pass, with LM head and sampling",
    "batch": "a decode pass of many requests at once",
    "prefill": "time from a prompt to its first token",
    "stream": "Engine.stream, compared with replays of the graph",
    "start": "time from the start of a process to its first token",
    "serve": "a server with OpenAI's API under load",
    "offload": "decode passes with K/V or weights in host memory",
    "speculate": "passes that verify drafts, and the tokens per pass on fixed texts",
}
MIX = "a prompt among requests"  # The group of the options that need --mix.
GROUPS = {
    "prompts": "Random token ids, or random words for --endpoint chat.",
    MIX: "Without a server: an engine in this process on a GPU, with the weights of --model or random weights.",
}
# Options of `speculate` that only timed passes use.
TIMED = ("preset", "runs", "requests", "context", "steps", "history", "quantize", "quantize_head")
EXAMPLE = "32000x1+64x31"


@dataclass(frozen=True)
class Contexts(Constraint):
    """The context of one request, or of each request of a mix. The text is the value."""

    expects: str = f"a number of tokens, or a mix like {EXAMPLE} of at most {MAX_SLOTS} requests"

    def accept(self, value: str) -> str:
        """Return `value` unchanged. Raises Rejected if it is not a valid mix, or if the mix has too many requests."""
        contexts_of(value)
        return value


def contexts_of(mix: str) -> list[int]:
    """Return the context of each request of a mix such as 32000x1+64x31. A single number means one request.

    Raises Rejected.
    """
    contexts: list[int] = []
    for part in mix.split("+"):
        tokens, times, count = part.partition("x")
        context, requests = (COUNT.accept(COUNT.read(text)) for text in (tokens, count if times else "1"))
        contexts += [context] * min(requests, MAX_SLOTS + 1)
    if len(contexts) > MAX_SLOTS:
        raise Rejected("range")
    return contexts


COUNT, ROWS, AMOUNT = Integer(1), Integer(1, MAX_SLOTS), Number(0, 1e12, above=True)
COUNTS = Several(COUNT)
PLACEHOLDERS = {COUNT: "N", ROWS: "N", Integer(0): "N", COUNTS: "N,N", Several(ROWS): "N,N"}


def _option(name: str, default, constraint: Constraint, help: str, *commands: str, **more) -> Option:
    """Declare an option that only commands that measure have. `more` has further fields of Option."""
    more = {"metavar": PLACEHOLDERS.get(constraint)} | more
    return Option(constraint, help, default, name=name, commands=commands, **more)


def _shared(name: str, *commands: str, group: str = "") -> Option:
    """Declare an option of the engine for commands that measure. The engine checks its conflicts with other options."""
    return replace(OPTIONS[name], commands=commands, group=group, needs=None, excludes={}, brief="")


ENGINES = ("decode", "batch", "prefill", "stream", "speculate", "profile", "tune")  # Commands with --model.
RUNS = "number of timed runs"
BEFORE = "tokens before the first pass"
PASSES = "number of passes of a run"

# Help texts, and the commands in recorded rows, list the options in this order.
BENCH_OPTIONS = (
    _option("runs", 9, COUNT, RUNS, "decode", "batch", "prefill", "stream"),
    _option("runs", 7, COUNT, RUNS, "start"),
    _option("format", "table", Choice(("table", "md", "csv", "json", "jsonl")), "format of stdout, or of the file that "
        "--output names", *BENCHES),
    _option("output", None, ANY, "write the results to a file; its suffix selects the format", *BENCHES,
        metavar="FILE", default_text="JSON"),
    _option("runs", 5, COUNT, RUNS, "offload"),
    # A load on a server, with the names that vLLM's benchmark uses if it has the option.
    _option("url", "http://127.0.0.1:8000", Url(), "address of the server", "serve", metavar="URL"),
    _option("model", None, ANY, "model name on the server, by default the first that it lists; with --mix a "
        "checkpoint", "serve", metavar="NAME", exclusive="model"),
    _option("endpoint", "completions", Choice(("completions", "chat")), "API endpoint that receives the requests",
        "serve"),
    _option("api_key_file", None, ANY, "file that contains the API key", "serve", metavar="FILE",
        default_text="TRIDECODE_API_KEY"),
    _option("timeout", 600.0, AMOUNT, "time limit of a request in seconds", "serve", metavar="S"),
    _option("num_prompts", None, COUNT, "number of requests", "serve", group="load",
        default_text="100, or all of --jsonl"),
    _option("request_rate", math.inf, Number(0, math.inf, above=True), "requests per second, at random times; inf "
        "sends all at once", "serve", group="load", metavar="R"),
    _option("burstiness", 1.0, AMOUNT, "1 is a Poisson process; lower values send bursts, higher values send more "
        "evenly", "serve", group="load", metavar="B"),
    _option("max_concurrency", None, COUNT, "maximum number of concurrent requests", "serve", group="load",
        default_text="no limit"),
    _option("warm_up", 1, Integer(0), "number of requests before the measurement, not counted", "serve", group="load"),
    _option("seed", None, Integer(0, 2**64 - 1), "seed of the random prompts and arrival times", "serve", group="load",
        metavar="N", default_text="random"),
    _option("input_tokens", 128, COUNT, "length of a prompt in tokens or words", "serve", group="prompts"),
    _option("output_tokens", 128, COUNT, "maximum tokens of an answer", "serve", group="prompts"),
    _option("jsonl", None, ANY, 'prompts from a file, one per line: {"prompt": ...}, {"messages": ...} or '
        '{"prompt_ids": ...}, and max_tokens; - is stdin', "serve", group="prompts", metavar="FILE"),
    _option("temperature", 0.0, Number(0, 100), "sampling temperature", "serve", group="prompts", metavar="T"),
    _option("ignore_eos", False, Flag(), "let answers reach their maximum length, also with --jsonl", "serve",
        group="prompts", exclusive="eos"),
    _option("no_ignore_eos", False, Flag(), "let answers end earlier, for servers without ignore_eos", "serve",
        group="prompts", exclusive="eos"),
    _option("percentiles", (99,), Several(Number(0, 100)), "percentiles of each time, in addition to mean, median and "
        "std", "serve", metavar="P,P", default_text="99"),
    _option("runs", 9, COUNT, RUNS, "serve", group=MIX),
    # The model.
    _option("preset", "qwen3-4b", Choice(tuple(PRESETS)), f"one of {', '.join(PRESETS)}", *ENGINES, "start", "offload",
        metavar="SHAPE", exclusive="model"),
    _option("preset", "qwen3-4b", Choice(tuple(PRESETS)), f"with --mix one of {', '.join(PRESETS)}", "serve",
        metavar="SHAPE", group=MIX, exclusive="model"),
    _option("model", None, ANY, "a checkpoint instead of random weights", *ENGINES, metavar="DIR_OR_ID",
        exclusive="model"),
    _option("runs", 7, COUNT, RUNS, "speculate"),
    *(_shared(name, *ENGINES) for name in ("quantize", "quantize_head")),
    _option("gguf", None, Choice(GGUF_TYPES), "random weights in the types that the tensors of such a GGUF file have",
        "decode", "batch", "prefill", "stream", "profile", "tune", excludes={
            "model": ((), " is for random weights; leave out --model"),
            "quantize": ((), " cannot be used with --quantize; leave out one of them")}),
    # Drafts need 16-bit K/V, so `speculate` has no such options.
    *(_shared(name, "decode", "batch", "prefill", "stream", "profile") for name in ("kv_dtype", "state_dtype")),
    *(_shared(name, "serve", group=MIX) for name in ("quantize", "quantize_head", "kv_dtype", "state_dtype")),
    # The work.
    _option("rows", None, Several(ROWS), "numbers of requests; the table has a line for each", "batch",
        default_text="1,2,4,...,64"),
    _option("requests", (1, 2, 4, 8, 16), Several(ROWS), "numbers of concurrent requests; the table has a line for "
        "each", "speculate", default_text="1,2,4,8,16"),
    _option("requests", 8, ROWS, "number of decoding requests", "serve", group=MIX),
    _option("context", 64, COUNT, BEFORE, "decode", "profile"),
    _option("context", ("64",), Several(Contexts()), f"{BEFORE}; the table has a line for each value. {EXAMPLE} means "
        "one request with 32,000 tokens and 31 requests with 64 tokens each", "batch", metavar="N,N",
        default_text="64"),
    _option("context", 64, COUNT, "prompt tokens", "stream"),
    _option("context", 1024, COUNT, BEFORE, "speculate"),
    _option("context", 32000, COUNT, BEFORE, "offload"),
    _option("context", 64, COUNT, "prompt tokens of each decoding request", "serve", group=MIX),
    _option("prompt_tokens", 2000, COUNT, "tokens of the prompt that arrives later", "serve", group=MIX),
    _option("prompt_tokens", (2048,), COUNTS, "prompt lengths; the table has a line for each", "prefill",
        default_text="2048"),
    _option("prompt_tokens", 2048, COUNT, "tokens of the prompt chunk, at most 2048", "profile"),
    _option("rows", 1, ROWS, f"number of requests in the pass, 1 to {MAX_SLOTS}", "profile", "tune"),
    _option("steps", 128, COUNT, PASSES, "decode", "batch", "stream"),
    _option("steps", 32, COUNT, PASSES, "speculate"),
    _option("steps", 16, COUNT, f"{PASSES}, and after each prompt", "offload"),
    _option("steps", 128, COUNT, "tokens that each request decodes before the prompt arrives", "serve", group=MIX),
    _shared("prompt_ms", "serve", group=MIX),
    _option("cached", 0, Integer(0), "cached tokens before the prompt, as in a second turn", "prefill"),
    _option("graph", ("full",), Several(Choice(GRAPHS)), "graph modes, as --graph of generate; the table has a line "
        "for each", "prefill", metavar="MODE,MODE", default_text="full"),
    _option("graph", ("full",), Several(Choice(GRAPHS)), "graph modes, as --graph of generate; the table has a line "
        "for each", "serve", metavar="MODE,MODE", default_text="full", group=MIX),
    _option("mix", False, Flag(), "time decoding requests while a prompt is read, and the first token of the prompt",
        "serve", group=MIX),
    _option("capacity", None, COUNT, "K/V positions to allocate", "decode", "prefill", "stream",
        default_text="as the run needs"),
    _option("sampling", "greedy", Choice(("greedy", "temperature", "all")), "kind of sampling; 'all' enables every "
        "filter", "decode", "batch", "stream"),
    _option("random_adapters", None, Several(Integer(1, 1024)), "numbers of random adapters that the rows use in turn; "
        "the table has a line for each, and compares it with the pass without adapters", "batch", metavar="N,N",
        excludes={"model": ((), " cannot be used with --model; use --preset")}),
    _option("random_adapters", None, Integer(1, 1024), "number of random adapters that the rows use in turn", "profile",
        metavar="N", default_text="none", excludes={
            "model": ((), " cannot be used with --model; use --preset"),
            "experts": ((), " cannot be used with --experts; leave out one of them")}),
    _option("rank", None, Integer(1, MAX_RANK), "rank of the random adapters", "batch", "profile", metavar="R",
        default_text=str(DEFAULT_RANK), needs=("random_adapters", " needs --random-adapters")),
    _option("ablate", False, Flag(), "also time the pass without workspace, without graph and without dependent launch",
        "decode"),
    _option("host", (1.0, 0.5, 0.0), Several(Number(0, 1)), "shares of the K/V in host memory; the table has lines for "
        "each", "offload", metavar="S,S", default_text="1,0.5,0"),
    _option("ring", 2, COUNT, "number of buffers of the ring on the device", "offload"),
    _option("prompt_tokens", None, COUNTS, "instead: read prompts of these lengths and continue them; the table has a "
        "line for each length", "offload", exclusive="instead"),
    _option("swap", False, Flag(), "instead: resume a conversation of --context tokens, by copying its K/V from the "
        "host or by computing it again", "offload", exclusive="instead"),
    _option("weights", None, AMOUNT, "instead: keep GIB of the weights (those of the last layers) in host memory, and "
        "all K/V on the device", "offload", exclusive="instead", metavar="GIB"),
    _option("kv_gib", 4.0, AMOUNT, "GiB of K/V on the device, for --prompt-tokens", "offload", metavar="GIB"),
    _option("history", 32000, COUNT, "tokens that the draft kernel searches", "speculate"),
    _shared("speculate_ngram", "speculate"),
    _option("tokenizer", None, ANY, "tokenizer of the texts", "speculate", metavar="DIR",
        default_text="the checkpoint's, or the bundled one with a preset"),
    _option("texts_only", False, Flag(), "only count tokens per pass on the texts, on any machine, without timing "
        "passes", "speculate"),
    # profile and tune.
    _option("output", None, ANY, "also write pictures (SVG), Chrome traces and figures to DIR", "profile",
        metavar="DIR"),
    _option("experts", None, ANY, "instead: count how often --prompt-tokens tokens of the text in FILE (- is stdin) "
        "choose each expert, and the experts of a pass of --rows rows, on any machine", "profile", metavar="FILE"),
    _option("minutes", 5.0, Number(0, 24 * 60, above=True), "time limit of the search in minutes", "tune",
        metavar="M"),
)  # fmt: skip


def options_of(command: str) -> dict[str, Option]:
    """Return the options of a bench, of profile or of tune by name, in the order of its help."""
    return {each.name: with_conflicts(each, command) for each in BENCH_OPTIONS if command in each.commands}


def with_conflicts(option: Option, command: str) -> Option:
    """Return an option with its conflicts: `serve` measures a server or --mix, and --texts-only times no passes."""
    if command == "serve" and option.name not in ("mix", "model", "format", "output"):
        if option.group == MIX:
            return replace(option, needs=("mix", f" needs --mix; add that, or leave out {option.flag}"))
        return replace(option, excludes={"mix": ((), " cannot be used with --mix; leave out one of them")})
    if command == "speculate" and option.name in TIMED:
        why = " cannot be used with --texts-only; leave out one of them"
        return replace(option, excludes={"texts_only": ((), why)})
    return option


def add_command(parser: Parser, command: str) -> None:
    """Add the options of a bench, of profile or of tune to its parser."""
    parser.set_defaults(model=None)
    parser.declare(options_of(command), GROUPS)
    add_verbose(parser)


def add_benches(bench: Parser) -> None:
    """Add a parser for each bench."""
    benches = bench.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Parser)
    for name, help in BENCHES.items():
        add_command(benches.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}."), name)


def add_script(parser: Parser, bench: str, names: Sequence[str], **defaults) -> None:
    """Add options of a bench to a script that measures the same, with other defaults."""
    declared = options_of(bench)
    chosen = {name: declared[name] for name in names}
    parser.declare(chosen | {name: replace(chosen[name], default=value) for name, value in defaults.items()})


def add_verbose(parser) -> None:
    """Add --verbose after the command.

    Its default is SUPPRESS, because a default would overwrite a --verbose before the command.
    """
    parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
