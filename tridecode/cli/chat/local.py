"""A model in this process: its answers, the lines of /stats about it, and the capture of graphs in idle time."""

import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch

from ...engine import Engine
from ...errors import EngineClosed, PromptError
from ...plan.memory import GIB, free_memory
from ...results import OutputChunk
from ...sampling import SamplingParams
from ...text.thinking import CLOSE, OPEN, THINKING_VARIABLE
from ..bench.measure import step_bytes
from ..bench.read import measure_read_bandwidth
from ..loading import Loader, first_adapter, tokenizer_of
from .model import Model, Prompt, Thinking

MIN_BYTES = 2**28  # Minimum bytes to read for a measurement of the bandwidth. Every cache is smaller.
PAUSE = 0.01  # Seconds between two captures in idle time. An answer may start in this time.


class LocalModel(Model):
    """An engine, and the loader that replaces it."""

    engine: Engine
    device: torch.device
    capacity: int

    def __init__(self, engine: Engine, loader: Loader | None = None, captures: bool = False):
        """Create the model.

        Args:
            loader: Loads other models for `switch`.
            captures: Capture passes that the engine may need while it is idle.
        """
        self._loader, self._captures = loader, captures
        self._idle: IdleCapture | None = None
        self.use(engine)

    def use(self, engine: Engine) -> None:
        """Replace the engine."""
        self.close()
        self.engine, self.loaded = engine, True
        self.name, self.device, self.capacity = engine.name, engine.device, engine.capacity
        self.largest = engine.config.max_position
        self.adapters, self.adapter = [*engine.adapters], first_adapter(engine)
        if self._captures:
            self._idle = IdleCapture(engine)

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
        params = replace(params, adapter=self.adapter)
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
        """Return lines about the engine and the GPU."""
        engine = self.engine
        drafts = "ngram {}:{}".format(*engine.plan.ngram) if engine.plan.ngram else "off"
        name = f"model {engine.name} on {engine.device}"
        name += f" with adapter {self.adapter}" if self.adapter else ""
        row = f"{name}, backend {engine.backend}, graph {engine.graph}, speculation {drafts}"
        return [row, *(gpu_lines(engine, last) if engine.device.type == "cuda" else [])]

    def switch(self, name: str, overrides: Collection[str], raw: bool) -> None:
        """Load another model. The current one is freed first if both do not fit in memory."""
        assert self._loader is not None
        self._loader.switch(self, name, overrides, raw)

    def lost(self, error: Exception) -> bool:
        """Return whether the GPU no longer responds."""
        return isinstance(error, RuntimeError) and not responds(self.device)

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


def gpu_lines(engine, last) -> list[str]:
    """Return the lines about GPU memory and the share of the read bandwidth that the last answer used."""
    free, whole = torch.cuda.mem_get_info(engine.device)
    reserved = torch.cuda.memory_reserved(engine.device)
    own, used, size = (f"{nbytes / GIB:.1f}" for nbytes in (reserved, whole - free, whole))
    rows = [f"GPU memory: {own} GiB by this chat, {used} of {size} GiB in use"]
    rate = 0.0 if last is None else last.timings.tokens_per_second
    if rate:
        bandwidth = read_bandwidth(engine.device)
        if bandwidth is None:
            rows.append("bandwidth: not measured, because too little memory is free")
        else:
            needed = step_bytes(engine, last.usage.prompt_tokens, last.usage.completion_tokens)
            rates = f"{bandwidth / 1e9:,.0f} GB/s, {needed / 1e9:.2f} GB a token"
            rows.append(f"{100 * needed * rate / bandwidth:.0f}% of the read bandwidth ({rates})")
    return rows


@cache
def read_bandwidth(device: torch.device) -> float | None:
    """Return bytes per second, measured at the first call; None if too little memory is free."""
    nbytes = min(2**32, free_memory(device) // 2)
    if nbytes < MIN_BYTES:
        return None
    with torch.cuda.device(device):  # Triton launches kernels on the current device.
        bandwidth = measure_read_bandwidth(device, nbytes)
        torch.cuda.empty_cache()  # Free the buffer of the measurement.
    return bandwidth


class IdleCapture(threading.Thread):
    """A thread that captures passes until all are captured, the engine is freed, or `end` is called.

    It holds only a weak reference to the engine.
    """

    def __init__(self, engine: Engine):
        super().__init__(daemon=True)
        self._engine, self._ended = weakref.ref(engine), threading.Event()
        self.start()

    def run(self) -> None:
        """Capture one pass after the other until all are captured or `end` is called."""
        with suppress(EngineClosed, RuntimeError):  # The next turn reports the loss of a GPU.
            while (engine := self._engine()) is not None and engine.capture_next():
                del engine
                if self._ended.wait(PAUSE):
                    return

    def end(self) -> None:
        """Stop the thread after the capture in progress."""
        self._ended.set()
        self.join()
