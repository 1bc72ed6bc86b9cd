"""The options of every command. Nothing here imports torch: `--help` answers at once."""

import argparse

from ..version import __version__
from .terminal import one_line

CHAT = """\
Talk with a model. In the chat: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
With stdin from a pipe or file, each line is one turn; answers go to stdout, everything else to stderr.
"""
GENERATE = """\
Answer one prompt: --prompt, --prompt-ids, or stdin when neither is given (one newline at its end is dropped).
The text streams to stdout, everything else goes to stderr. With --json, stdout gets exactly one line.
Exit codes: 0 done, 1 error, 2 wrong options, 130 interrupted, 141 reader of stdout gone.
"""
INFO = """\
Show model, memory plan, GPU, versions and what would run. The weights are not loaded, but a Hugging Face id is
downloaded if it is not in the cache.
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors on one line instead of the whole usage."""

    def __init__(self, *args, **kwargs):
        # No abbreviations: a script's --to must not change its meaning when an option is added.
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        self.exit(2, f"tridecode: error: {one_line(message)} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tridecode", description="Run open-weight language models on one GPU, or on the CPU.")
    parser.add_argument("--version", action="version", version=f"tridecode {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log to stderr, and show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    engine = engine_options()
    both = [engine, sampling_options()]
    commands.add_parser("chat", help="talk with a model", description=CHAT, parents=both)
    generate = commands.add_parser("generate", help="answer one prompt", description=GENERATE, parents=both)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; sent through the chat template unless --raw")
    prompt.add_argument("--prompt-ids", metavar="IDS", type=token_ids, help="token ids as they are, like 1,2,3")
    generate.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: token_ids, text, finish_reason, usage, timings (seconds), seed, and error if any",
    )
    info = commands.add_parser("info", help="show what would run, without loading", description=INFO, parents=[engine])
    info.add_argument("--json", action="store_true", help="print one JSON object (sizes in bytes)")
    return parser


def engine_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("engine")
    group.add_argument("--model", metavar="DIR_OR_ID", help="directory or Hugging Face id (default: bundled)")
    group.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--backend", default="auto", choices=["auto", "triton", "torch"], help="default: auto")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="default: auto, the checkpoint's (float32 ones: bfloat16 on a GPU); float32 on the CPU",
    )
    group.add_argument("--max-seq-len", type=int, metavar="N", help="context to allocate (default: what fits)")
    group.add_argument(
        "--graph", default="full", choices=["full", "none"], help="one CUDA graph a step, or none (default: full)"
    )
    # SUPPRESS: the subcommand's default must not overwrite a --verbose given before the subcommand.
    group.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return options


def sampling_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("sampling", "Defaults are the model's own, from its generation_config.json.")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, prompt and history: same tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: to the context's end)")
    group.add_argument("--raw", action="store_true", help="no chat template: the model continues the text as it is")
    return options


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids separated by commas, like 1,2,3, got {text!r}") from None


def sampling_overrides(args) -> dict:
    """The sampling options that were given; the others keep the model's defaults."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    return {name: value for name in names if (value := getattr(args, name)) is not None}
