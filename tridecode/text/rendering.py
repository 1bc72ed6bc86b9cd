"""Rendering of one chat template. This module runs in a child process of sandbox.py."""

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
    """The template called raise_exception."""


class OutputTooLong(Exception):
    """The output of the template exceeds the limit."""


class _Generation(jinja2.ext.Extension):
    """The Jinja block {% generation %}, which marks the text of the assistant for training.

    Only its body is rendered.
    """

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise Refusal(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML. Models were trained on unescaped text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the filters and globals of transformers' apply_chat_template."""
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
        setup: the source of the template, and the maximum number of characters of its output.

    Returns:
        A function that renders the template with a dict of variables. Called with None, it returns the names of the
        variables that the template reads.
    """
    source, max_characters = setup
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
            if size > max_characters:
                raise OutputTooLong
        return "".join(pieces)

    return render


# Python loads filters, the time zone and tracebacks at their first use. Use them now, because the child process cannot
# open files later.
for _text in (
    "{{ 'a' | pprint | wordwrap | striptags }}{{ lipsum(1) }}{{ strftime_now('%c %Z') }}",
    "{{ raise_exception('') }}",
    "{{",
):
    with suppress(jinja2.TemplateError):
        make_environment().from_string(_text).render()
