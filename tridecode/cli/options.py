"""Options of the commands that are not options of the engine, and conversion of all declared options to argparse.

This module must not import torch, so that `--help` is fast.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..arguments import Choice, Constraint, Flag, Integer, Number, Option, Rejected, Several, Text, options_of
from ..errors import ParameterError
from ..kernels.device import GPUS
from ..options import OPTIONS
from ..sampling import SamplingParams

ANY = Text()
NAME = Text("a name", r".*\S.*")
ORIGIN = Text("* or an origin like https://chat.example, without a path", r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+")
HOST = Text("* or a host name like chat.example, without a port", r"\*|[^\s/:?#@*]+")
# When the model is known, the ids are checked against its vocabulary.
IDS = Several(Integer(-(10**40), 10**40), "token ids separated by commas, like 1,2,3", min_items=0)
SECONDS = Number(0, 1e6)
# Commands whose options can be set by the configuration file and by environment variables.
CONFIGURED = ("chat", "generate", "serve", "info", "precompile")
# Headings of `--help` in their order. All other groups, which are of the engine, follow.
HEADINGS = ("prompt", "conversation", "model", "memory", "sampling", "form of the answer", "remote", "output", "server")
GROUPS = {  # Group of options -> its description in the help.
    "sampling": "Defaults are the model's own, from its generation_config.json.",
    "form of the answer": "At most one of these; see docs/structured.md.",
}


class Url(Constraint):
    """Base URL of a server, with or without http:// and with or without /v1."""

    expects = "an address like http://127.0.0.1:8000"

    def accept(self, value) -> str:
        """Return the URL without the slash at its end. Raises Rejected if it is not an http or https URL of a host."""
        value = value.strip()
        value = value if "://" in value else f"http://{value}"
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        except ValueError:  # The port is out of range.
            usable = False
        if not usable:
            raise Rejected("choice")
        return re.sub(r"(/v1(/chat/completions|/completions|/models)?)?/*$", "", value)


def _once(name: str, default, constraint: Constraint, help: str, *commands: str, **more) -> Option:
    """Declare an option that is only for one call, so that the configuration file cannot set it."""
    return Option(constraint, help, default, name=name, commands=commands, unsaved=commands, **more)


def _option(name: str, default, constraint: Constraint, help: str, *commands: str, **more) -> Option:
    return Option(constraint, help, default, name=name, commands=commands, **more)


OTHERS = (
    _option("model", None, ANY, "directory, GGUF file, Hugging Face id, or address of its page", *CONFIGURED,
            group="model", metavar="DIR_OR_ID", default_text="bundled",
            brief="directory, GGUF file or Hugging Face id"),
    _option("url", None, Url(), "use the model of a server with OpenAI's API at this address; --model is "
            "then its name there (default: the first one)",
            "chat", "generate", group="remote", metavar="URL", brief="use the model of a server"),
    _option("api_key_file", None, ANY, "file that contains the API key on one line", "chat", "generate", "serve",
            group="remote", metavar="FILE", default_text="TRIDECODE_API_KEY, if set",
            brief="file that contains the API key"),
    _once("resume", False, Flag(), "continue the conversation that was saved last; in a terminal each answer is saved",
          "chat", group="conversation",
          exclusive="saved", brief="continue the last conversation"),
    _once("session", None, ANY, "continue the conversation with this name, or start it", "chat", group="conversation",
          exclusive="saved", metavar="SESSION", brief="continue or start a named conversation"),
    _once("system", None, ANY, "the system message", "chat", "generate", group="conversation", metavar="TEXT",
          default_text="none", brief="the system message"),
    _option("plain", False, Flag(), "print answers as plain text, not as Markdown", "chat",
            group="conversation", brief="answers as plain text, not Markdown"),
    _option("think", "on", Choice(("on", "off", "hide")), "for models that think: on shows the thinking, off "
        "disables it, hide shows only its length", "chat", group="conversation",
          brief="show, disable or hide the thinking"),
    _option("stats", None, Choice(("full", "short", "off")), "statistics line after an answer: full shows all that "
        "fits, short shows length and speed", "chat", group="conversation", default_text="full"),
    _option("overflow", None, Choice(("error", "drop-oldest", "stop")), "if a turn does not fit in the context: "
        "refuse it, omit the oldest turns, or end the chat", "chat", group="conversation",
            default_text="drop-oldest, in a pipe error"),
    _once("prompt", None, ANY, "the prompt; the chat template is applied unless --raw is set", "generate",
          group="prompt",
          exclusive="prompt", metavar="TEXT", brief="the prompt, as QUESTION"),
    _once("prompt_ids", None, IDS, "token ids, like 1,2,3", "generate", group="prompt", exclusive="prompt",
          metavar="IDS"),
    _once("messages", None, ANY, 'a chat as JSON, [{"role": "user", "content": "..."}, ...], or a saved session; - is '
          "stdin", "generate", group="prompt", exclusive="prompt", metavar="FILE",
          brief="a chat as JSON, or a saved session"),
    _once("jsonl", None, ANY, 'answer each line, {"prompt": ...}, {"messages": ...} or {"prompt_ids": ...} with '
          "its own sampling options, as one JSON line, --slots of them at a time; lines whose answers --output already "
          "contains are skipped; - is stdin", "generate", group="prompt", exclusive="prompt", metavar="FILE",
          brief="answer each line of a file of prompts"),
    _once("allow_special", False, Flag(), "with --raw: the text may contain control tokens", "generate",
          group="prompt", needs=("raw", " needs --raw: in a chat only the template writes control tokens")),
    _once("no_reuse_prefix", False, Flag(), "compute every prompt completely, without cached prefixes", "generate",
        group="prompt"),
    _once("raw", False, Flag(), "use no chat template: the model continues the text", "chat", "generate",
          group="sampling",
          excludes={"messages": ((), " takes text, --messages is a chat; leave out one of them")},
          brief="continue the text, without a chat template"),
    _once("unordered", False, Flag(), "with --jsonl: print each answer when it ends, not in the order of the lines",
          "generate", group="output", needs=("jsonl", " needs --jsonl")),
    _once("n", 1, Integer(1), "number of answers, with the seeds SEED, SEED+1, ...", "generate", group="output",
        metavar="N", excludes={"jsonl": ((), " cannot be used with --jsonl; repeat the line with other seeds")},
          brief="number of answers"),
    _once("output", None, ANY, "file for the answers; it replaces an older file when it is complete", "generate",
          group="output", metavar="FILE", default_text="stdout", brief="file for the answers"),
    _once("json", False, Flag(), "print one JSON object: token_ids, text, finish_reason, usage, timings (seconds), "
          "seed, logprobs if requested, and error if any", "generate", group="output", brief="print one JSON object"),
    _once("json", False, Flag(), "print one JSON object (sizes in bytes)", "info", group="output",
          brief="print one JSON object"),
    _option("kernels", False, Flag(), "print the kernel and launch config of each linear", "info", group="output",
          brief="print the kernel of each linear"),
    _once("gpu", None, Choice(tuple(GPUS)), f"one of {', '.join(GPUS)}; this machine does not need it",
          "precompile", metavar="GPU",
          group="model",
          default_text="this machine's", brief="GPU to compile for"),
    _option("host", "127.0.0.1", ANY, "address to listen on", "serve", group="server", metavar="HOST",
          brief="address to listen on"),
    _option("port", 8000, Integer(0, 65535), "port to listen on; 0 selects a free port", "serve", group="server",
            metavar="N", brief="port to listen on"),
    _option("served_model_name", None, NAME, "name of the model for clients", "serve", group="server", metavar="NAME",
            default_text="its id, or its directory's name", brief="name of the model for clients"),
    _option("any_model", False, Flag(), "accept requests that name any model or no model", "serve", group="server"),
    _option("timeout", 600.0, SECONDS, "time limit of a request in seconds; 0 removes the limit", "serve",
            group="server", metavar="S"),
    _option("max_connections", 1000, Integer(1, 1_000_000), "maximum number of open connections; at the limit, those "
            "that wait longest for a request are closed", "serve", group="server", metavar="N",
            brief="maximum number of open connections"),
    _option("timeout_keep_alive", 75, Integer(0, 1_000_000), "seconds for which a connection without a request stays "
            "open", "serve", group="server", metavar="S", brief="seconds for which an idle connection stays open"),
    _option("grace", 10.0, SECONDS, "seconds that running requests may take to end when the server stops", "serve",
            group="server", metavar="S"),
    _option("ssl_certfile", None, ANY, "certificate in PEM format; the server then uses https", "serve", group="server",
            metavar="FILE", brief="certificate; the server then uses https"),
    _option("ssl_keyfile", None, ANY, "key of the certificate, without a passphrase, if it is in another file", "serve",
            group="server",
            metavar="FILE", brief="key of the certificate"),
    _option("cors", None, ORIGIN, "origin of web pages that may send requests, such as https://chat.example, or *; "
        "repeatable", "serve", group="server", metavar="ORIGIN", repeated=True, default_text="none",
          brief="origin of web pages that may send requests"),
    _option("allow_host", None, HOST, "host name that requests may use, in addition to those of this machine, or *; "
            "repeatable; a server with a key accepts all", "serve", group="server", metavar="NAME", repeated=True,
            default_text="none", brief="host name that requests may use"),
    _option("adapter_root", None, ANY, "directory below which clients may load adapters with POST "
            "/v1/load_lora_adapter; without it they may load none", "serve", group="server", metavar="DIR",
            default_text="none"),
    _option("log_prompts", False, Flag(), "also log prompts; answers are never logged", "serve", group="server"),
    _once("graph_stats", False, Flag(), "at the end, print a table of the passes by rows and mode to stderr",
          "chat", "generate", group="output"),
    _option("quiet", False, Flag(), "print only errors to stderr; in a chat, print no notes before the first prompt "
        "and no statistics lines", "chat", "generate", group="output", brief="print only errors to stderr"),
)  # fmt: skip
SAMPLING = options_of(SamplingParams)
# Names that ollama and llama.cpp use for options.
SYNONYMS = {
    "model": ("-m", "-hf", "--hf-repo"),
    "slots": ("-np", "--parallel"),
    "prompt": ("-p",),
    "max_tokens": ("-n", "--num-predict", "--n-predict", "--predict"),
    "system": ("-sys", "--system-prompt"),
    "temperature": ("--temp",),
    "repetition_penalty": ("--repeat-penalty",),
    "max_seq_len": ("-c", "--ctx-size", "--num-ctx"),
}
# Numbers that ollama and llama.cpp accept in place of a limit. They mean that the option is not set.
NO_LIMIT = {"max_tokens": "-1", "max_seq_len": "0"}


def options_for(command: str) -> dict[str, Option]:
    """Return the declared options of a command by name, in the order of its help."""
    model, *others = OTHERS
    every = [model, *OPTIONS.values(), *SAMPLING.values(), *others]
    return {each.name: each for each in every if command in each.commands}


def add_options(
    parser: argparse.ArgumentParser, declared: Mapping[str, Option], about: Mapping[str, str] = GROUPS
) -> None:
    """Add options to a parser, in their groups. `about` has the descriptions of groups."""
    places: dict[str, Any] = {"": parser}  # Group, or set of options that exclude each other -> its place.
    for name, option in declared.items():
        if option.group not in places:
            places[option.group] = parser.add_argument_group(option.group, about.get(option.group))
        place = places[option.group]
        if option.exclusive:
            key = f"one of {option.exclusive}"
            if key not in places:
                places[key] = place.add_mutually_exclusive_group()
            place = places[key]
        add_option(place, option, default=None if option is SAMPLING.get(name) else option.default)


def add_option(parser, option: Option, **more) -> None:
    """Add one option and its aliases. `more` replaces arguments of argparse that the declaration sets."""
    words = f" (default: {option.described_default})" if option.described_default else ""
    settings: dict = {"dest": option.name, "help": option.flag_help + words, "default": option.default}
    constraint = option.constraint
    if isinstance(constraint, Flag):
        settings["action"] = "store_false" if option.default is True else "store_true"
    else:
        settings["metavar"] = option.metavar
        if isinstance(constraint, Choice):
            settings["choices"] = constraint.choices
        elif not option.from_file:
            settings["type"] = reader(constraint.item if option.repeated else constraint)
            if option.name in NO_LIMIT:
                settings["type"] = limited(settings["type"], NO_LIMIT[option.name])
        if option.repeated:
            settings["action"] = "append"
    action = parser.add_argument(option.flag, **settings | more)
    for word in SYNONYMS.get(option.name, ()):  # The help does not list them.
        parser._option_string_actions.setdefault(word, action)
    for flag, (value, help) in option.aliases.items():
        parser.add_argument(flag, dest=option.name, action="store_const", const=value, help=help)


def reader(constraint: Constraint) -> Callable[[str], Any]:
    """Return a function with which argparse parses a value that must satisfy the constraint."""

    def read(text: str) -> Any:
        try:
            return constraint.parse(text)
        except ParameterError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def limited(read: Callable[[str], Any], no_limit: str) -> Callable[[str], Any]:
    """Return a function like `read`, to which `no_limit` means that the option is not set."""
    return lambda text: None if text.strip() == no_limit else read(text)


def sampling_overrides(args) -> dict:
    """Return the sampling options that are set. For all others, the defaults of the model apply."""
    values = {name: value for name in SAMPLING if (value := getattr(args, name, None)) is not None}
    return values | ({"logit_bias": dict(values["logit_bias"])} if "logit_bias" in values else {})


def engine_options(args) -> dict:
    """Return the engine's options of a command line, as keywords of Engine.load."""
    return {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
