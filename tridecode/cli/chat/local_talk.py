"""LocalChat: the chat with an engine of this process."""

import time
from collections.abc import Iterator

import torch

from ...engine import Engine
from ...results import Piece
from ...sampling import SamplingParams
from ...text.prompt import Prompt
from ...text.thinking import CLOSE, SWITCH
from ..loading import tokenizer_of
from ..signals import one_interrupt
from ..terminal import counted
from . import stats
from .conversation import Conversation
from .display import opens_thinking
from .idle import IdleCapture
from .talk import DEVICE_LOST, Chat
from .turn import with_seed


class LocalChat(Chat):
    """A conversation with an engine; loading.Loader gives it another one."""

    engine: Engine

    def set_think(self, mode: str) -> None:
        """Set how thinking is handled: on, off or hide. If the template has no switch, off only prints a line."""
        tokenizer, raw = tokenizer_of(self.engine), self.conversation.raw
        switch = not raw and SWITCH in tokenizer.template_variables
        self.opens_thinking = not raw and opens_thinking(tokenizer, None)
        self.thinks = switch or self.opens_thinking or (not raw and tokenizer.thinks)
        if mode == "off" and not switch and (raw or self.thinks):
            why = "with --raw there is no chat template" if raw else f"the chat template has no variable {SWITCH}"
            self.output.note(f"thinking cannot be switched off: {why}; /think hide shows only its length")
            mode = self.think if self.think != "off" else "on"
        self.think, self.used = mode, None
        self.variables = {SWITCH: mode != "off"} if switch else None
        self.opens_thinking = not raw and opens_thinking(tokenizer, self.variables)

    def pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece]:
        if isinstance(prompt, list) and isinstance(prompt[0], int):  # the template has had its variables
            return self.engine.stream(prompt, params)
        return self.engine.stream(prompt, params, template_variables=self.variables)

    def reading(self) -> tuple[int, int, int] | None:
        return self.engine.scheduler.reading()

    def facts(self) -> list[str]:
        return stats.engine_lines(self.engine, self.last)

    def switch(self, name: str) -> None:
        """Load another model; Ctrl-C keeps the present one."""
        with one_interrupt(self.interactive):  # while that comes back, too
            try:
                self.loader.switch(self, name)
            except KeyboardInterrupt:
                if not self.interactive or self.engine is None:
                    raise
                self.stopped_at = time.monotonic()
                self.output.note("stopped; the model stays")

    def use_idle_time(self) -> None:
        if self.idle is not None:
            self.idle.end()
        self.idle = IdleCapture(self.engine)

    def use(self, engine: Engine) -> None:
        """Go on with another model; the conversation stays."""
        self.engine, self.params, self.last = engine, engine.default_params(**self.given), None
        self.set_think(self.think)
        if self.idle is not None:
            self.use_idle_time()
        if self.store:
            self.store.model = engine.name

    def goes_on(self, error: Exception) -> bool:
        if self.engine is None:
            self.output.error("there is no model any more; the chat ends")
            self.exit_code = 1
        elif isinstance(error, RuntimeError) and not responds(self.engine.device):
            self.output.error(f"{self.engine.device} can no longer be used by this program; the chat ends")
            self.exit_code = DEVICE_LOST
        else:
            return True
        return False

    def go_on(self) -> bool:
        """Continue the last answer where it ended."""
        message, answer = self.conversation.turns[-1]
        return self.ask(message, replaces=True, begun=answer)

    def seeded(self) -> SamplingParams:
        return with_seed(self.params)

    def begun_prompt(self, prompt: Prompt, begun: str) -> Prompt:
        if not begun:
            return prompt
        if isinstance(prompt, str):
            return prompt + begun
        return self.engine.encode(prompt, self.variables) + self.answer_ids(begun)

    def answer_ids(self, text: str) -> list[int]:
        """Return the tokens of an answer; only its think block has control tokens."""
        tokenizer, (thought, tag, rest) = tokenizer_of(self.engine), text.partition(CLOSE)
        parts = [(thought + tag, True), (rest, False)] if tag and self.thinks else [(text, False)]
        around = tokenizer.bos_id, tokenizer.eos_id
        ids = [tokenizer.encode(part, special) for part, special in parts if part]
        return [token for part in ids for token in part if token not in around]

    def make_room(self, base: Conversation, line: str, begun: str = "") -> Conversation:
        more = len(self.answer_ids(begun)) if begun and not base.raw else 0
        return self.fitted(base, line, begun, more)

    def largest(self) -> int:
        return self.engine.config.max_position

    def count(self, prompt: str | list[dict]) -> int:
        tokenizer, context = tokenizer_of(self.engine), self.engine.capacity
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt, context=context))
        return len(tokenizer.encode_chat(prompt, context, **self.variables or {}))

    def cut(self, last: Piece) -> str:
        """Return a line that explains why the answer was cut, or ""."""
        if last.finish_reason != "length":
            return ""
        why = f"the context of {counted(self.engine.capacity, 'token')} is full"
        more = self.overflow == "drop-oldest" and len(self.conversation.turns) - self.conversation.dropped > 1
        if last.usage and last.usage.prompt_tokens + last.usage.completion_tokens < self.engine.capacity:
            why, more = f"max_tokens ({self.params.max_tokens:,}) was reached", True
        return f"the answer was cut: {why}" + ("; /continue goes on" if self.interactive and more else "")


def responds(device: torch.device) -> bool:
    """Return whether the device still takes calls: after a device-side assert or a bad address every call fails."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
