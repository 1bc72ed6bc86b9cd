"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox on plain JSON values."""

import json
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import PromptError


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; to render, its body is all that matters."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A template's source and the special tokens it may name (bos_token, eos_token, ...), rendered as text.

    The environment is that of transformers' apply_chat_template. The sandbox keeps a template from files and code; it
    does not limit its time or memory.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.source = source
        self.special_tokens = special_tokens

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)

    def render(self, messages: list[dict], variables: dict) -> str:
        """The prompt's text; PromptError with the template's own words where it refuses or fails."""
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        try:
            return self._template.render(given | {"messages": messages})
        except jinja2.TemplateSyntaxError as error:
            raise PromptError(f"the chat template is broken, line {error.lineno}: {error.message}; use --raw") from None
        except Exception as error:  # whatever a program written by someone else does
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refused these messages: {reason}") from None
