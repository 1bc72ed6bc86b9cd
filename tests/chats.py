"""Helpers of the chat tests: a scripted engine, and a pseudo-terminal."""

import os
from pathlib import Path
from types import SimpleNamespace

from tridecode import SamplingParams
from tridecode.errors import PromptError
from tridecode.results import OutputChunk, Timings, Usage
from tridecode.text.tokenizer import ChatPrompt

ROOT = Path(__file__).parent.parent
PATH = os.pathsep.join(map(os.path.abspath, [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
# One thread, because torch's threads wait for each other on a busy machine.
ENVIRONMENT = os.environ | {"TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
READY = "\x1b[?2004h"  # The prompt is shown, and the program reads keys.
STREAMS = r"\x1b\[\?2004l(?:[^\n]*\n)?[^\n]*\x1b\[\?7;2004h[^\x1b]*[^\s\x1b]{30}"  # The answer has begun to stream.


class Script:
    """An engine with scripted answers: lists of texts, exceptions, or pairs of texts and finish_reason."""

    name, capacity, notes, backend, graph = "script", 100, (), "triton", "full"
    plan, adapters = SimpleNamespace(ngram=None), {}
    device, config = SimpleNamespace(type="cpu"), SimpleNamespace(max_position=100)
    tokenizer = SimpleNamespace(
        encode=lambda text, context=None: list(text),
        encode_chat=lambda messages, context=None, **variables: "".join(m["content"] for m in messages),
        prepare_chat=lambda messages, context=None, **variables: ChatPrompt([], ""),
        template_variables=frozenset(),
        supports_thinking=False,
    )

    def __init__(self, *answers):
        self.answers, self.prompts, self.variables = list(answers), [], []

    def default_params(self, **overrides):
        return SamplingParams(**overrides)

    scheduler = SimpleNamespace(reading=lambda: None)

    def stream(self, prompt, params, template_variables=None):
        self.prompts.append(prompt)
        self.variables.append(template_variables)
        answer = self.answers.pop(0)
        # The engine raises this error when it is called, not when the caller iterates.
        if isinstance(answer, PromptError):
            raise answer
        texts, finish = answer if isinstance(answer, tuple) else (answer, "stop")
        return self._chunks(texts, finish)

    def _chunks(self, texts, finish):
        for text in texts:
            if isinstance(text, BaseException):
                raise text
            yield OutputChunk(1, text)
        usage, error = Usage(10, 4, len(texts)), "step 2 gave NaN" if finish == "error" else None
        yield OutputChunk(None, "", None, finish, usage, Timings(0.25, 0.5, 8.0), error)


def as_messages(*turns):
    """Return chat messages of alternating roles, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def enter(child, keys: str, shows: str) -> None:
    """Type `keys` into the terminal of `child`, and wait for `shows` and the next prompt."""
    child.send(keys)
    child.expect_exact(shows)
    child.expect_exact(READY)


def leave(child) -> None:
    """Type Ctrl-D at the prompt."""
    child.sendeof()
    leaves(child)


def leaves(child, code=0):
    """Wait for the end of the program and check its exit code."""
    import pexpect

    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
