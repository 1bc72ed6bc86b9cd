"""Rendering of one chat template, in a child process of sandbox.py."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Broken(Exception):
    """The template cannot be compiled."""


class Refusal(jinja2.TemplateError):
    """Raised by a template's raise_exception."""


class OutputTooLong(Exception):
    """The template writes more than it may."""


class _Generation(jinja2.ext.Extension):
    """{% generation %}, which marks the assistant's part for training; rendering needs its body only."""

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
    """Return the environment of transformers' apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def renderer(setup: list) -> Callable[[dict | None], str | list[str]]:
    """Compile a template.

    Args:
        setup: its source, and the most characters that it may write.

    Returns:
        A function that renders the given variables; given None, it returns the names that the template reads.
    """
    source, longest = setup
    environment = make_environment()
    try:
        template = environment.from_string(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    except jinja2.TemplateSyntaxError as error:
        raise Broken(f"line {error.lineno}: {error.message}") from None

    def render(variables: dict | None) -> str | list[str]:
        if variables is None:
            return sorted(names)
        pieces, size = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > longest:
                raise OutputTooLong
        return "".join(pieces)

    return render


# Import and read here, while files can be opened, what Python loads late: filters, the time zone, tracebacks.
for _text in (
    "{{ 'a' | pprint | wordwrap | striptags }}{{ lipsum(1) }}{{ strftime_now('%c %Z') }}",
    "{{ raise_exception('') }}",
    "{{",
):
    with suppress(jinja2.TemplateError):
        make_environment().from_string(_text).render()
