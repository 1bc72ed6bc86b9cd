"""The child process of chat_template.py: renders one chat template, a JSON line in and a JSON line out for each render.

It is run as a file and imports nothing of the package, so that it starts in a moment. Once its imports are done it may
open no files, start no processes and take no more memory than argv[1] bytes; each render has argv[2] seconds of CPU
time and may write argv[3] characters. The parent's clock ends it where it is stuck.
"""

import json
import resource
import sys
import time
from datetime import datetime
from functools import partial

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_REASON = 300  # characters of a template's own message that are shown


class Refusal(jinja2.TemplateError):
    """What a template's raise_exception raises."""


class TooLong(Exception):
    pass


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; to render, its body is all that matters."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise Refusal(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers' apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def render(template: jinja2.Template, given: dict, longest: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(given):
        pieces.append(piece)
        size += len(piece)
        if size > longest:
            raise TooLong
    return "".join(pieces)


def answer(work) -> dict:
    """{"text": ...} from `work()`, or the kind of failure and its reason; whatever someone else's program does."""
    try:
        return {"text": work()}
    except MemoryError:
        return {"failure": "memory"}
    except TooLong:
        return {"failure": "length"}
    except jinja2.TemplateSyntaxError as error:
        return {"failure": "broken", "reason": f"line {error.lineno}: {_short(error.message or '')}"}
    except Exception as error:
        kind = "refused" if isinstance(error, Refusal) else "failed"
        return {"failure": kind, "reason": _short(str(error)) or type(error).__name__}


def _short(text: str) -> str:
    text = " ".join(text[: 2 * LONGEST_REASON].split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


def limit(kind: int, value: int, forever: bool = True) -> None:
    """Lower a limit of this process, for ever or until the next call."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value if forever else hard))


def main(memory: int, seconds: int, longest: int) -> None:
    environment, requests, answers = make_environment(), sys.stdin.buffer, sys.stdout.buffer
    # What is imported or read late must be here before files cannot be opened: filters, the time zone, tracebacks.
    for text in (
        "{{ 'a' | pprint | wordwrap | striptags }}{{ lipsum(1) }}{{ strftime_now('%c %Z') }}",
        "{{ raise_exception('') }}",
        "{{",
    ):
        answer(partial(lambda text: environment.from_string(text).render(), text))
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_NOFILE, 3)
    limit(resource.RLIMIT_NPROC, 0)
    limit(resource.RLIMIT_CORE, 0)

    def reply(value) -> None:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    def allow_seconds() -> None:
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds, forever=False)

    reply("ready")
    allow_seconds()
    template = None

    def compile_source() -> str:
        nonlocal template
        template = environment.from_string(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        return json.dumps(sorted(names))

    source = json.loads(requests.readline())
    compiled = answer(compile_source)
    for line in requests:
        allow_seconds()
        given = json.loads(line)
        if template is None or given is None:  # None asks for the names that the template reads
            reply(compiled)
        else:
            reply(answer(partial(render, template, given, longest)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
