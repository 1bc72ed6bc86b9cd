"""A model in this process."""

from collections.abc import Collection, Iterator

import torch

from ...engine import Engine
from ...errors import PromptError
from ...results import OutputChunk
from ...sampling import SamplingParams
from ...text.thinking import CLOSE, OPEN, THINKING_VARIABLE
from ..loading import Loader, tokenizer_of
from . import stats
from .idle import IdleCapture
from .model import Model, Prompt, Thinking


class LocalModel(Model):
    """An engine, and the loader that replaces it."""

    engine: Engine
    device: torch.device
    capacity: int

    def __init__(self, engine: Engine, loader: Loader | None = None):
        self._loader = loader
        self._idle: IdleCapture | None = None
        self.use(engine)

    def use(self, engine: Engine) -> None:
        """Replace the engine."""
        self.engine, self.loaded = engine, True
        self.name, self.device, self.capacity = engine.name, engine.device, engine.capacity
        self.largest = engine.config.max_position
        if self._idle is not None:
            self.use_idle_time()

    def free_engine(self) -> None:
        """Free the engine, to make room for another."""
        del self.engine
        self.loaded = False

    def default_params(self, **overrides) -> SamplingParams:
        """Return the checkpoint's sampling defaults with `overrides` applied."""
        return self.engine.default_params(**overrides)

    def thinking(self, mode: str, raw: bool) -> Thinking:
        """Return whether the chat template supports thinking, and the variables that set the mode."""
        if raw:
            return Thinking(refusal="with --raw there is no chat template")
        tokenizer = tokenizer_of(self.engine)
        switch = THINKING_VARIABLE in tokenizer.template_variables
        variables = {THINKING_VARIABLE: mode != "off"} if switch else None
        possible = switch or tokenizer.supports_thinking or opens_thinking(tokenizer)
        refusal = f"the chat template has no variable {THINKING_VARIABLE}" if possible and not switch else ""
        return Thinking(possible, opens_thinking(tokenizer, variables), variables, refusal)

    def stream(
        self, prompt: Prompt, params: SamplingParams, overrides: Collection[str], thinking: Thinking, prefix: str = ""
    ) -> Iterator[OutputChunk]:
        """Yield the engine's answer in chunks. If the answer begins with `prefix`, yield what follows it."""
        if isinstance(prompt, str):
            return self.engine.stream(prompt + prefix, params)
        if prefix:
            return self.engine.stream(
                self.engine.encode(prompt, thinking.variables) + self._ids(prefix, thinking), params
            )
        return self.engine.stream(prompt, params, template_variables=thinking.variables)

    def count(self, prompt: Prompt, thinking: Thinking, prefix: str = "") -> int:
        """Return the number of tokens of a prompt with `prefix`.

        Raises TooLong, without counting, if the text is far too long.
        """
        tokenizer, context = tokenizer_of(self.engine), self.capacity
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt + prefix, context=context))
        more = len(self._ids(prefix, thinking)) if prefix else 0
        return len(tokenizer.encode_chat(prompt, context, **thinking.variables or {})) + more

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the prompt that the engine reads."""
        return self.engine.scheduler.reading()

    def facts(self, last: OutputChunk | None) -> list[str]:
        """Return lines about the engine's memory, passes and latest answer."""
        return stats.engine_lines(self.engine, last)

    def switch(self, name: str, overrides: Collection[str], raw: bool) -> None:
        """Load another model. The current one is freed first if both do not fit in memory."""
        assert self._loader is not None
        self._loader.switch(self, name, overrides, raw)

    def lost(self, error: Exception) -> bool:
        """Return whether the GPU no longer responds."""
        return isinstance(error, RuntimeError) and not responds(self.device)

    def use_idle_time(self) -> None:
        """Capture passes that the engine may need, until the next turn begins."""
        self.close()
        self._idle = IdleCapture(self.engine)

    def close(self) -> None:
        """Stop the captures in idle time."""
        if self._idle is not None:
            self._idle.end()

    def _ids(self, answer: str, thinking: Thinking) -> list[int]:
        """Return the token ids of an answer. Only the tags of its think block become control tokens."""
        tokenizer, (reasoning, tag, rest) = tokenizer_of(self.engine), answer.partition(CLOSE)
        parts = [(reasoning + tag, True), (rest, False)] if tag and thinking.possible else [(answer, False)]
        around = tokenizer.bos_id, tokenizer.eos_id
        ids = [tokenizer.encode(part, special) for part, special in parts if part]
        return [token for part in ids for token in part if token not in around]


def opens_thinking(tokenizer, variables: dict | None = None) -> bool:
    """Return whether the template itself begins the think block, so that answers start inside it."""
    try:
        return tokenizer.prepare_chat([{"role": "user", "content": "?"}], **variables or {}).tag == OPEN
    except PromptError:  # The template is missing, or requires other messages.
        return False


def responds(device: torch.device) -> bool:
    """Return whether the device works. After a device-side assert or an illegal address, every call fails."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
