"""Parsers of all commands. This module must not import torch, so that `--help` is fast."""

import argparse
import re
import sys
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from ..arguments import listed, nearest
from ..version import __version__
from .bench_options import BENCH, BENCHES, add_benches, add_command, add_verbose
from .command_line import Parser, is_model
from .configuration import Configuration
from .inputs import stdin_is_file
from .options import CONFIGURED

ABOUT = """\
Run open-weight language models on one GPU, or on the CPU. A question in place of COMMAND begins a chat. Text from a
pipe is answered without COMMAND.
"""
EXAMPLES = """\
examples:
  tridecode "Why is the sky blue?"                     ask the bundled model
  tridecode chat --model Qwen/Qwen3-4B                 use another model
  git diff | tridecode generate --prompt "Explain:"    one answer, in a pipe
"""
CHAT = """\
Talk with a model. QUESTION is the first message: tridecode "Why is the sky blue?" is a chat too.
In the chat: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
Without a terminal, only QUESTION is answered; if stdin is a pipe or a file, it is appended to QUESTION. Without
QUESTION, each line of stdin is one turn. Answers are written to stdout, everything else to stderr. Write a message of
several lines between \""" and \""".
"""
CHAT_CODES = """\
Exit codes: 0 done, 1 error, 2 wrong options, 3 the GPU is lost, 130 interrupted, 141 reader of stdout gone.
"""
GENERATE = """\
Answer one prompt: QUESTION, which is the same as --prompt, or --prompt-ids, --messages, or otherwise stdin (one newline
at its end is dropped). If stdin is a pipe or a file, it is appended to QUESTION, or replaces a - that is the last word
of QUESTION or is the only text on a line. </dev/null adds no text. --jsonl answers a file of prompts.
The text streams to stdout, and everything else is written to stderr. With --json, stdout gets one line per answer.
"""
SESSIONS = """\
List the saved conversations, the newest first: name, date, turns, size, and the title or first words.
"""
MODEL_CACHE = """\
List the models that --model accepts without a download: the bundled one, those in the Hugging Face cache and the GGUF
files in the working directory, with size and kind. --model also accepts a directory or another GGUF file, and downloads
the id of any other model.
"""
CONFIG = """\
Show every setting as a line of the configuration file. A setting that is set has a comment with its source; the others
are comments with their defaults. An option on the command line overrides a variable like TRIDECODE_MODEL, and a
variable overrides the file.
"""
GENERATE_CODES = """\
Exit codes: 0 done, 1 error (with --jsonl: of any line), 2 wrong options, 130 interrupted, 141 reader of stdout gone.
"""
SERVE = """\
Serve a model over HTTP with OpenAI's and Anthropic's APIs: /v1/chat/completions, /v1/responses, /v1/messages and more.
docs/serving.md describes the API.
After Ctrl-C or SIGTERM, running requests may finish within the grace time; a second signal stops the server at once.
"""
SERVE_CODES = """\
Exit codes: 0 stopped, 1 error, 2 wrong options, 3 the engine failed, 130 or 143 stopped at once.
"""
FLEET = """\
Serve models on several GPUs and machines with Ray Serve: CONFIG is a YAML file, or --model and --replicas describe one
model. Requests go to the replica that holds their prefix. docs/fleet.md describes the file.
After Ctrl-C or SIGTERM, running requests may finish within the grace time.
"""
INFO = """\
Show the model, the memory plan, the GPU, versions, and how the engine would run. Weights are neither loaded nor, for a
Hugging Face id, downloaded.
"""
PRECOMPILE = """\
Compile the kernels of an engine with these options into Triton's cache, so that the engine starts without compiling.
With --gpu, the machine needs no GPU, for example to build a container image. The engine needs the same cache path and
the same version of Triton.
"""
PROFILE = """\
Show the time of each kernel of a decode pass and of a prompt chunk, from the GPU's activity records, and compare it
with the read bandwidth that is measured in the same run. Prints tables and, as the last line, one JSON object. Needs a
GPU, except with --experts. docs/profile.md defines the figures.
"""
QUANTIZE = """\
Write a quantized copy of an unquantized checkpoint. Weights are rounded to nearest, and the scale of each group is the
best of a few candidates. The format is compressed-tensors, which transformers also reads; see docs/quantization.md.
"""
CONVERT = """\
Write a GGUF file as a Hugging Face checkpoint, which other programs can read: config.json, the weights in bfloat16, the
tokenizer and the chat template. Values that are quantized in the file are rounded once; see docs/gguf.md.
"""
MERGE = """\
Write a checkpoint with a LoRA adapter merged into its weights. Other programs can read it, and it is as fast as the
base model. To serve several adapters of one model at the same time, use --adapter of chat, generate and serve.
"""
TUNE = """\
Search the launch configs with which a decode pass of one model is fastest on this GPU, by the time of the whole
captured pass. Faster configs are written to a table in the user's cache directory, which every engine on this GPU reads
at load. Prints the changes and, as the last line, one JSON object. Needs a GPU.
"""

# This command lists the ids of cached models without starting Python. It lists only names that bash does not expand.
# It contains no single quotes, because fish puts the command into single quotes.
CACHED = (
    'ls -d "${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"/models--*--* 2>/dev/null'
    r' | sed -n "s|.*/models--\([A-Za-z0-9._-]*\)--\([A-Za-z0-9._-]*\)\$|\1/\2|p"'
)
MODELS = {
    "bash": "_tridecode_models",
    "zsh": "_tridecode_models",
    "fish": "(__tridecode_models)",
    "tcsh": "d",
    "preamble": {
        "bash": f"_tridecode_models() {{\n  compgen -d -- $1\n  compgen -f -X '!*.gguf' -- $1\n"
        f'  compgen -W "bundled $({CACHED})" -- $1\n}}',
        "zsh": f"_tridecode_models() {{\n  compadd -- bundled $({CACHED})\n  _files -g '*.gguf(-.)'\n  _files -/\n}}",
        "fish": f"function __tridecode_models\n  echo bundled\n  sh -c '{CACHED}'\n  __fish_complete_suffix .gguf\n"
        "  __fish_complete_directories\nend",
    },
}


class Foreign(NamedTuple):
    """A command of another program, for users who know that program.

    Attributes:
        words: The words that replace it here; () if no command does.
        arguments: The numbers of arguments with which it is replaced.
        example: Text that follows `words` in an error message, or the advice if there are no words.
        refused: The largest number of arguments before the options with which it is an error. With more it begins a
            question.
    """

    words: tuple[str, ...]
    arguments: tuple[int, ...] = ()
    example: str = ""
    refused: int = 0

    def problem(self, name: str) -> str:
        """Return an error message for the command `name`."""
        if 1 in self.arguments:
            return f"{name} needs a model: tridecode {name} {self.example}; tridecode models lists the cache"
        fix = " ".join(("use tridecode", *self.words, self.example)) if self.words else self.example
        return f"there is no command {name}{'; ' if fix else ''}{fix}".rstrip()


ALWAYS = sys.maxsize  # `refused` of names that no question begins with.


FOREIGN = {
    "run": Foreign(("chat", "--model"), (1,), "DIR_OR_ID"),
    "list": Foreign(("models",), (0,)),
    "ls": Foreign(("models",), (0,)),
    "pull": Foreign(("models", "download"), (1,), "ID"),
    "download": Foreign(("models", "download"), (1,), "ID"),
    "rm": Foreign(("models", "remove"), (1,), "ID"),
    "show": Foreign(("info", "--model"), (1,), "DIR_OR_ID"),
    "ps": Foreign(("info",), ()),
    "start": Foreign(("serve",), ()),
    "ask": Foreign(("generate",), (), "QUESTION"),
    "help": Foreign(("--help",), (0,)),
    "version": Foreign(("--version",), (0,)),
    "stop": Foreign((), (), "Ctrl-C ends a chat or a server", 1),
    "create": Foreign((), refused=1),
    "cp": Foreign((), refused=ALWAYS),
    "push": Foreign((), refused=1),
    "signin": Foreign((), (), "hf auth login logs in to Hugging Face", ALWAYS),
    "signout": Foreign((), (), "hf auth logout logs out of Hugging Face", ALWAYS),
    "resume": Foreign(("chat", "--resume"), refused=1),
    "load": Foreign(("chat", "--model"), (), "DIR_OR_ID", 1),
    "cli": Foreign(("chat",), refused=1),
    "server": Foreign(("serve",), refused=1),
    "tokenize": Foreign((), refused=1),
    "perplexity": Foreign((), refused=1),
    "embedding": Foreign((), refused=1),
    "llama-cli": Foreign(("chat",), refused=ALWAYS),
    "llama-server": Foreign(("serve",), refused=ALWAYS),
    "llama-bench": Foreign(("bench",), refused=ALWAYS),
    "llama-tokenize": Foreign((), refused=ALWAYS),
}


class Program(Parser):
    """Parser of the whole command line. Words that do not name a command are a question for `chat`."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments. A command line without a command runs the command that has its options, usually `chat`."""
        args = list(sys.argv[1:] if args is None else args)
        at = next((i for i, word in enumerate(args) if word != "--verbose"), len(args))
        args[at:] = self._with_command(args[at:])
        return super().parse_known_args(args, namespace)

    def _with_command(self, words: list[str]) -> list[str]:
        """Return a command line that begins with a command, or with an option of the whole program.

        Text from a pipe or a file without a question is a prompt of `generate`, if that has the options.
        """
        assert self._subparsers is not None
        commands: Any = self._subparsers._group_actions[0].choices
        first, *others = words or [""]
        if not words and stdin_is_file():
            return ["generate"]
        if first == "bench" and (not others or re.match(r"-(?!h$|-help$|-verbose$)", others[0])):
            self.error(f"bench needs a name first: {listed([*BENCHES])}; like tridecode bench decode --model DIR_OR_ID")
        if not words or first in commands or first.split("=")[0] in self._option_string_actions:
            return words
        if re.fullmatch(r"-\S+", first):
            typed = {word.split("=")[0] for word in takewhile("--".__ne__, words) if re.fullmatch(r"--[a-z]\S+", word)}
            order = ("generate", *CONFIGURED) if stdin_is_file() else CONFIGURED
            able = (each for each in order if typed <= commands[each]._option_string_actions.keys())
            return [next(able, "chat"), *words]
        arguments = [word for word in others if not word.startswith("-")]
        if first == "help" and len(others) == 1 and others[0] in commands:
            return [others[0], "--help"]
        leading = list(takewhile(lambda word: not word.startswith("-"), others))
        if (command := FOREIGN.get(first)) and len(arguments) in command.arguments and bool(arguments) == bool(leading):
            return [*command.words, *others]
        if first in ("run", "show") and arguments and arguments[0] == others[0] and is_model(others[0]):
            return [*FOREIGN[first].words, *others]
        if re.search(r"\s|\?$", first):
            return ["chat", *words]
        options = {name[2:]: name for name in self._option_string_actions if name.startswith("--")}
        if command and len(leading) <= command.refused:
            self.error(command.problem(first))
        if near := nearest(first, [*commands, *options]):
            self.error(f"there is no command {first}; did you mean {options.get(near, near)}?")
        return ["chat", *words]


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell. The metavar of an argument determines its completion."""

    def __call__(self, parser, namespace, shell, option_string=None):
        """Print the completion script of a shell, with sessions, models and files as arguments, and exit."""
        import shtab  # Nothing else needs this import.

        sessions = shtab.cmd("tridecode sessions --names 2>/dev/null")
        # Keys are metavars of options.
        known = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "DIR_OR_ID": MODELS, "SESSION": sessions}

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
    """Return the parser of the whole command line."""
    usage = "%(prog)s [OPTIONS] COMMAND ..."
    parser = Program(prog="tridecode", usage=usage, description=ABOUT, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"tridecode {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log to stderr, and show tracebacks")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=["bash", "zsh", "fish", "tcsh"],
        metavar="SHELL",
        help="print a completion script for bash, zsh, fish or tcsh",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, prog=parser.prog)
    add = commands.add_parser

    add("chat", help="talk with a model", description=CHAT, epilog=CHAT_CODES)
    add("generate", help="answer one prompt, or a file of prompts", description=GENERATE, epilog=GENERATE_CODES)
    about = "serve a model over HTTP with OpenAI's and Anthropic's APIs"
    add("serve", help=about, description=SERVE, epilog=SERVE_CODES)
    about = "serve models on several GPUs and machines"
    fleet_options(add("fleet", help=about, description=FLEET))
    about = "list, download and remove models of the Hugging Face cache"
    model_options(add("models", help=about, description=MODEL_CACHE))
    about = "list, show, rename, delete and export saved conversations"
    session_options(add("sessions", help=about, description=SESSIONS))
    about = "show how a model would run, and problems of this machine, without loading"
    add("info", aliases=["doctor"], help=about, description=INFO)
    add("precompile", help="compile an engine's kernels before it starts", description=PRECOMPILE)
    quantize = add("quantize", help="write a quantized checkpoint", description=QUANTIZE)
    source = "directory or Hugging Face id of an unquantized checkpoint, or bundled"
    quantize.add_argument("model", metavar="MODEL", help=source)
    quantize.add_argument("out", metavar="OUT", help="directory to write; it must be new or empty")
    quantize.add_argument(
        "--to", default="int4", choices=["fp8", "int8", "int4"], help="format of the weights (default: int4)"
    )
    head_help = "format of the LM head (default: keep)"
    quantize.add_argument("--head", default="keep", choices=["keep", "fp8", "int8", "int4"], help=head_help)
    quantize.add_argument("--quiet", action="store_true", help="do not show a progress bar")
    convert = add("convert", help="write a GGUF file as a Hugging Face checkpoint", description=CONVERT)
    convert.add_argument("model", metavar="FILE", help="GGUF file, or owner/name:Q4_K_M on the Hugging Face hub")
    convert.add_argument("out", metavar="OUT", help="directory to write; it must be new or empty")
    convert.add_argument("--quiet", action="store_true", help="do not show a progress bar")
    merge = add("merge", help="write a checkpoint that contains an adapter", description=MERGE)
    merge.add_argument("model", metavar="MODEL", help=source)
    merge.add_argument("out", metavar="OUT", help="directory to write; it must be new or empty")
    about = "adapter: a directory that peft has saved, or a Hugging Face id"
    merge.add_argument("--adapter", required=True, metavar="PATH", help=about)
    merge.add_argument("--quiet", action="store_true", help="do not show a progress bar")
    add_verbose(merge)
    add_verbose(quantize)
    configuration = Configuration()
    config = add("config", help="show the settings and their sources", description=CONFIG)
    config.add_argument("changes", nargs="*", help=argparse.SUPPRESS)
    config.set_defaults(configuration=configuration, wrong=parser.wrong)
    for name in CONFIGURED:
        command = commands.choices[name]
        command.configure(name, configuration)
        command.siblings = [commands.choices[other] for other in ("chat", "generate", "serve") if other != name]
        command.set_defaults(refuse=command.error, configuration=configuration)
        add_verbose(command)
    commands.choices["chat"].add_question("the first message")
    commands.choices["generate"].add_question("the prompt, as with --prompt")
    add_benches(add("bench", help="time this engine on a GPU", description=BENCH))
    add_command(add("profile", help="show the time of each kernel", description=PROFILE), "profile")
    add_command(add("tune", help="search launch configs for this GPU", description=TUNE), "tune")
    return parser


def list_options(parser):
    """Add the options of a command that lists something. Return its subparsers, to which other actions are added."""
    parser.set_defaults(json=False, names=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    for each in (parser, actions.add_parser("list", aliases=["ls"], help="list them, the same as without an ACTION")):
        form = each.add_mutually_exclusive_group()
        add_flag = partial(form.add_argument, action="store_true", default=argparse.SUPPRESS)
        add_flag("--json", help="print one JSON object per line")
        add_flag("--names", help="print only the names")
        add_verbose(each)
    return actions


def model_options(models) -> None:
    """Add the options and actions of `models`."""
    actions = list_options(models)
    about = "Hugging Face id, like Qwen/Qwen3-4B, or address of its page"
    download = actions.add_parser("download", aliases=["pull"], help="download models to the cache")
    download.add_argument("names", nargs="+", metavar="ID", help=about)
    words = "remove models from the cache; if one does not exist, an error names it and none is removed"
    remove = actions.add_parser("remove", aliases=["rm", "delete"], help=words)
    remove.add_argument("names", nargs="+", metavar="ID", help=about)


def fleet_options(fleet) -> None:
    """Add the arguments of `fleet`."""
    fleet.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file that describes the fleet")
    fleet.add_argument("--model", metavar="DIR_OR_ID", help="model, without CONFIG (default: bundled)")
    fleet.add_argument("--replicas", type=int, metavar="N", help="number of replicas, without CONFIG (default: 1)")
    fleet.add_argument("--gpus", type=float, metavar="N", help="GPUs of a replica, without CONFIG: 1 or 0 (default: 1)")
    fleet.add_argument("--host", metavar="HOST", help="address to listen on (default: the file's, or 127.0.0.1)")
    fleet.add_argument("--port", type=int, metavar="N", help="port to listen on (default: the file's, or 8000)")
    about = "address of a Ray cluster (default: the file's, RAY_ADDRESS, the cluster of this machine, or a new one)"
    fleet.add_argument("--address", metavar="HOST:PORT", help=about)
    about = "update the fleet that runs on the cluster to this configuration, and exit"
    fleet.add_argument("--update", action="store_true", help=about)
    fleet.set_defaults(refuse=fleet.error)
    add_verbose(fleet)


def session_options(sessions) -> None:
    """Add the options and actions of `sessions`."""
    actions = list_options(sessions)
    show = actions.add_parser("show", help="print a conversation as Markdown, without SESSION the last one")
    show.add_argument("name", nargs="?", metavar="SESSION")
    rename = actions.add_parser("rename", help="rename a conversation")
    rename.add_argument("name", metavar="SESSION")
    rename.add_argument("new", metavar="NEW")
    words = "delete conversations; if one does not exist, an error names it and none is deleted"
    actions.add_parser("delete", aliases=["rm"], help=words).add_argument("names", nargs="+", metavar="SESSION")
    export = actions.add_parser("export", help="write a conversation as Markdown to stdout or a new file")
    export.add_argument("name", metavar="SESSION")
    export.add_argument("file", nargs="?", metavar="FILE")
