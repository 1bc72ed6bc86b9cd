"""The options of every command. Nothing here imports torch: `--help` answers at once."""

import argparse
import sys

from ..checkpoint.hub import BUNDLED
from ..version import __version__
from .bench_options import BENCH, add_benches, add_quantize, add_shape, add_verbose
from .command_line import Parser
from .completions import kinds
from .configuration import Configuration
from .engine_options import engine_options, graph_stats_option
from .serve_options import SERVE, serve_options
from .values import logit_bias, minutes, positive, row_count, server_url, token_ids

EXAMPLES = """\
examples:
  tridecode chat                                       talk with the small bundled model
  tridecode chat --model Qwen/Qwen3-4B                 with a model from Hugging Face, or of a directory
  git diff | tridecode generate --prompt "Explain:"    one answer, in a pipe
"""
CHAT = """\
Talk with a model. In the chat: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
With stdin from a pipe or file, each line is one turn; answers go to stdout, everything else to stderr. A message of
several lines stands between \""" and \""".
"""
CHAT_CODES = """\
Exit codes: 0 done, 1 error, 2 wrong options, 3 the GPU is lost, 130 interrupted, 141 reader of stdout gone.
"""
GENERATE = """\
Answer one prompt: --prompt, --prompt-ids, --messages, or stdin when none is given (one newline at its end is dropped).
Beside --prompt, stdin comes after it if it is a pipe or a file (</dev/null: nothing does); a - that is the last word of
--prompt, or alone on a line of it, says where instead. --jsonl answers a file of prompts.
The text streams to stdout, everything else goes to stderr. With --json, stdout gets exactly one line an answer.
"""
SESSIONS = """\
List the conversations that were saved, the newest first: name, when, turns, size, and the title or first words.
"""
CONFIG = """\
Show every setting as a line of the configuration file: those that are set with where they come from, the others as
comments with their defaults. An option of the command line goes before a variable like TRIDECODE_MODEL, and that before
the file.
"""
GENERATE_CODES = """\
Exit codes: 0 done, 1 error (with --jsonl: of any line), 2 wrong options, 130 interrupted, 141 reader of stdout gone.
"""
INFO = """\
Show model, memory plan, GPU, versions and what would run. The weights are neither loaded nor, for a Hugging Face id,
downloaded.
"""
SAMPLING = (  # the fields of SamplingParams, each an option
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "json_schema", "regex", "choice", "grammar",
)  # fmt: skip
PROFILE = """\
Show where the time of one token step and of one prefill chunk goes, from the GPU's own activity records, kernel by
kernel, against the read bandwidth measured in the same run. Prints tables and, as the last line, one JSON object. Needs
a GPU. docs/profile.md says what each figure is.
"""
QUANTIZE = """\
Write an unquantized checkpoint again with its weights in fewer bits, rounded to nearest, the scale of each group the
best of a few. The format is compressed-tensors, which transformers reads as well; see docs/quantization.md.
"""
TUNE = """\
Search the launch shapes that make one token step fastest on this GPU for one model's matrices, judged by the time of
the whole captured step. What is faster goes into a table in the user's cache directory, which every engine on this GPU
reads when it loads. Prints what changed and, as the last line, one JSON object. Needs a GPU.
"""


def is_model(words: list[str]) -> bool:
    """Whether they look like a model's name, and not like a message."""
    return len(words) == 1 and ("/" in words[0] or words[0] == BUNDLED.name)


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell. A metavar says what is completed."""

    def __call__(self, parser, namespace, shell, option_string=None):
        import shtab  # here, because nothing else needs it

        known = kinds()

        def complete_paths(parser):
            for action in parser._actions:
                if action.metavar in known:
                    action.complete = known[action.metavar]
                for command in action.choices.values() if isinstance(action.choices, dict) else ():
                    complete_paths(command)

        complete_paths(parser)
        parser._print_message(shtab.complete(parser, shell) + "\n", sys.stdout)
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    words = "Run open-weight language models on one GPU, or on the CPU."
    parser = Parser(prog="tridecode", description=words, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"tridecode {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log to stderr, and show tracebacks")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=["bash", "zsh", "fish", "tcsh"],
        help="print a script that teaches the shell to complete commands, options and files",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    engine = engine_options()
    running = [engine, graph_stats_option(), sampling_options()]
    add_chat_options(commands.add_parser("chat", help="talk with a model", description=CHAT, parents=running))
    words = dict(help="answer one prompt, or a file of them", description=GENERATE)
    generate = commands.add_parser("generate", parents=running, **words)
    generate_options(generate)
    words = dict(help="serve a model over HTTP, by OpenAI's and Anthropic's APIs", description=SERVE)
    serve_options(commands.add_parser("serve", parents=[engine], **words))
    words = dict(help="list, rename, delete and export saved conversations", description=SESSIONS)
    session_options(commands.add_parser("sessions", **words))
    words = dict(help="show what would run, without loading, and what stands in its way", description=INFO)
    info = commands.add_parser("info", aliases=["doctor"], parents=[engine], **words)
    info.add_argument("--json", action="store_true", help="print one JSON object (sizes in bytes)")
    info.add_argument("--kernels", action="store_true", help="print the kernel and launch config of each linear")
    words = dict(help="write a checkpoint in fewer bits", description=QUANTIZE)
    quantize = commands.add_parser("quantize", **words)
    source = "directory or Hugging Face id of an unquantized checkpoint, or bundled"
    quantize.add_argument("model", metavar="MODEL", help=source)
    quantize.add_argument("out", metavar="OUT", help="a new or an empty directory")
    quantize.add_argument("--to", default="int4", choices=["fp8", "int8", "int4"], help="(int4)")
    quantize.add_argument("--head", default="keep", choices=["keep", "fp8", "int8", "int4"], help="LM head (keep)")
    quantize.add_argument("--quiet", action="store_true", help="no progress bar")
    add_verbose(quantize)
    words = dict(help="show the settings and where each comes from", description=CONFIG)
    configuration = Configuration()
    commands.add_parser("config", **words).set_defaults(configuration=configuration, wrong=parser.wrong)
    for command in ("chat", "generate", "serve", "info"):
        commands.choices[command].configure(command, configuration)
        commands.choices[command].words(*(("--prompt", bool) if command == "generate" else ("--model", is_model)))
    add_benches(commands.add_parser("bench", help="time this engine on a GPU", description=BENCH))
    profile = commands.add_parser("profile", help="show where a step's time goes", description=PROFILE)
    add_shape(profile, model=True)
    add_quantize(profile)
    profile.add_argument("--context", type=positive, default=64, metavar="N", help="tokens before the first step (64)")
    profile.add_argument(
        "--prompt-tokens", type=positive, default=2048, metavar="N", help="of the prefill chunk, at most 2048 (2048)"
    )
    profile.add_argument("--rows", type=row_count, default=1, metavar="N", help="requests in the step, 1 to 64 (1)")
    profile.add_argument("--output", metavar="DIR", help="also write pictures (SVG), Chrome traces and figures there")
    add_verbose(profile)
    tune = commands.add_parser("tune", help="search launch shapes for this GPU", description=TUNE)
    add_shape(tune, model=True)
    add_quantize(tune, kv_dtype=False)
    rows_help = "tune steps of so many requests, 1 to 64 (1)"
    tune.add_argument("--rows", type=row_count, default=1, metavar="N", help=rows_help)
    tune.add_argument("--minutes", type=minutes, default=5.0, metavar="M", help="the longest that it may search (5)")
    add_verbose(tune)
    return parser


def add_chat_options(chat) -> None:
    """The options of `chat` alone; args.refuse(message) ends as a wrong option does."""
    chat.epilog = CHAT_CODES
    chat.set_defaults(refuse=chat.error)
    words = "With --url the model is that server's, and --model its name there (default: the first it names)."
    server = chat.add_argument_group("server", words)
    server.add_argument(
        "--url",
        type=server_url,
        metavar="URL",
        help="of a server with OpenAI's API, like http://127.0.0.1:8000, instead of an engine in this process",
    )
    server.add_argument("--api-key-file", metavar="FILE", help="one line; without it TRIDECODE_API_KEY, if set")
    group = chat.add_argument_group("conversation", "In a terminal it is saved after each answer.")
    saved = group.add_mutually_exclusive_group()
    saved.add_argument("--resume", action="store_true", help="continue the conversation that was saved last")
    saved.add_argument("--session", metavar="SESSION", help="continue the conversation of that name, or begin it")
    group.add_argument("--system", metavar="TEXT", help="the system turn (default: none)")
    group.add_argument("--plain", action="store_true", help="answers as plain text; in a terminal they are Markdown")
    group.add_argument(
        "--think",
        default="on",
        choices=["on", "off", "hide"],
        help="thinking models: think, shown dimmed in a terminal; do not think; or show only its length (default: on)",
    )
    words = "the line after an answer: all that fits, length and speed, or none (default: full)"
    group.add_argument("--stats", choices=["full", "short", "off"], help=words)
    group.add_argument(
        "--overflow",
        choices=["error", "drop-oldest", "stop"],
        help="a turn that does not fit in the context: refuse it, leave out the oldest turns, or end (default: "
        "drop-oldest, in a pipe error)",
    )


def session_options(sessions) -> None:
    """The options of `sessions`."""
    form = sessions.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line")
    form.add_argument("--names", action="store_true", help="only their names")
    add_verbose(sessions)
    actions = sessions.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    rename = actions.add_parser("rename", help="give one another name")
    rename.add_argument("name", metavar="SESSION")
    rename.add_argument("new", metavar="NEW")
    words = "delete some; what is not there is told, and then none is deleted"
    actions.add_parser("delete", aliases=["rm"], help=words).add_argument("names", nargs="+", metavar="SESSION")
    export = actions.add_parser("export", help="write one as Markdown, to stdout or a file that is not there yet")
    export.add_argument("name", metavar="SESSION")
    export.add_argument("file", nargs="?", metavar="FILE")


def sampling_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("sampling", "Defaults are the model's own, from its generation_config.json.")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="on prompt and answer; 1 is off")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="on the answer, -2 to 2; 0 is off")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="on the answer, -2 to 2; 0 is off")
    group.add_argument(
        "--logit-bias", type=logit_bias, action="append", metavar="ID=VALUE", help="added to its logit; repeatable"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, prompt and history: same tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: to the context's end)")
    group.add_argument("--stop", action="append", metavar="STRING", help="ends the answer, never shown; repeatable")
    group.add_argument("--stop-token-ids", type=token_ids, metavar="IDS", help="end it too, beside the model's own")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="the model's own stop tokens do not end the answer"
    )
    group.add_argument("--raw", action="store_true", help="no chat template: the model continues the text as it is")
    return options


def generate_options(generate) -> None:
    """The options of `generate` alone; args.refuse(message) ends as a wrong option does."""
    generate.epilog = GENERATE_CODES
    generate.set_defaults(refuse=generate.error)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; sent through the chat template unless --raw")
    prompt.add_argument("--prompt-ids", metavar="IDS", type=token_ids, help="token ids as they are, like 1,2,3")
    prompt.add_argument(
        "--messages",
        metavar="FILE",
        help='a chat as JSON, [{"role": "user", "content": "..."}, ...], or a saved session; - is stdin',
    )
    prompt.add_argument(
        "--jsonl",
        metavar="FILE",
        help='answer each line, {"prompt": ...}, {"messages": ...} or {"prompt_ids": ...} with sampling options of its '
        "own if any, as one JSON line, --slots of them at a time; lines that --output holds already are skipped; - is "
        "stdin",
    )
    generate.add_argument(
        "--unordered", action="store_true", help="with --jsonl: each answer as it ends, not in the order of the lines"
    )
    queue = "with --jsonl: lines that wait for a slot at most (default: three for each slot)"
    generate.add_argument("--max-queue", type=positive, metavar="N", help=queue)
    generate.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    generate.add_argument("--allow-special", action="store_true", help="with --raw: text may write control tokens")
    generate.add_argument("--n", type=positive, default=1, metavar="N", help="answers; seeds SEED, SEED+1, ... (1)")
    generate.add_argument("--output", metavar="FILE", help="write there, and only once complete, instead of to stdout")
    generate.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: token_ids, text, finish_reason, usage, timings (seconds), seed, logprobs if asked "
        "for, and error if any",
    )
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: logprobs of each token and of the N likeliest"
    )
    form = generate.add_argument_group("form of the answer", "One of these; docs/structured.md says more.")
    form.add_argument("--json-schema", metavar="FILE", help="JSON that this schema allows")
    form.add_argument("--regex", metavar="PATTERN", help="a text that the regular expression matches as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")
    form.add_argument("--grammar", metavar="FILE", help="a text of this grammar in Lark's form")
    generate.add_argument("--no-reuse-prefix", action="store_true", help="compute every prompt from its first token")


def sampling_overrides(args) -> dict:
    """The sampling options that were given; the others keep the model's defaults."""
    given = {name: value for name in SAMPLING if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given
