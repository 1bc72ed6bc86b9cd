"""Request: one generation, from the tokens of its prompt to its last output chunk."""

import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

import torch

from ..errors import ParameterError, conflict
from ..layout import MAX_STOP_IDS
from ..results import OutputChunk, Result, Timings, TokenLogprobs, Usage
from ..sampling import SamplingParams
from ..text.grammar import Grammar
from ..text.stop_strings import Reader, StopStrings
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..blocks.adapter import Adapter
    from ..blocks.spec import ModelSpec
    from ..text.detokenizer import Detokenizer
    from .driver import Driver


@dataclass(eq=False, repr=False)
class Request:
    """A generation, waiting or active. Iterate over its output chunks, or wait for its result.

    It advances while any thread waits for any request of its engine. It keeps its output chunks (`chunks`), so each
    iterator starts at the first one. The request is cancelled if an iterator is closed or dropped, or if the request
    itself is dropped. Therefore the engine has only weak references to requests, except during a step.

    For callers: iteration, `result`, `cancel`, `drop`, and the attributes `chunks`, `finish_reason`, `failure` and
    `completion_tokens`. The threads of an engine use the other attributes under the lock of its driver.

    `chunks` only grows. The last token is added together with the output chunk that ends the request. After an
    interrupt or an error, `resume` rebuilds the other attributes from `chunks`.
    """

    # int32: the prompt, then the sampled tokens. The slot of the request refers to the same array.
    tokens: "array[int]"
    params: SamplingParams  # The sampling parameters, with a seed.
    stop_ids: tuple[int, ...]  # The stop ids of the model and of params.
    limit: int  # Number of tokens, prompt and output, at which the request ends.
    started: float  # time.perf_counter() at submission.
    continues: bool = False  # Whether the output continues the text of the prompt. In a chat it does not.
    reuse_prefix: bool = True
    salt: Hashable = ""  # The request shares K/V only with requests of the same salt.
    grammar: Grammar | None = None  # The grammar that the output must follow.
    adapter: "Adapter | None" = None  # The salt of the request then contains the number of the adapter.
    # Whether the request is a score. Each pass then predicts the next prompt token, and each chunk contains that token.
    scores: bool = False
    reader: Callable[[], Reader] | None = (
        None  # Returns a reader that searches for stop strings instead of the request.
    )
    logits: torch.Tensor | None = None  # fp32 [prompt tokens, vocab], filled by the passes of a scoring request.
    chunks: list[OutputChunk] = field(default_factory=list)  # The output so far. It grows while other threads step.
    # Error that ended the request without a last chunk: of the pass that read the prompt, or of the reader.
    failure: Exception | None = None
    cancelled: bool = False  # Whether the request was cancelled, or the next step will cancel it.
    first: float | None = None  # Time of the first token.
    reused: int | None = None  # Number of positions whose K/V were present when the prompt was first read.
    drafted: int = 0  # Number of draft tokens that were verified.
    accepted: int = 0  # Number of draft tokens that were accepted.
    driver: "Driver" = field(init=False)  # This is set when the request is submitted.

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.ref = weakref.ref(self)
        hash(self.ref)  # Compute and cache the hash now. After the request is collected, this is not possible.

    def __repr__(self) -> str:
        return f"Request(prompt_tokens={self.prompt_tokens}, finish_reason={self.finish_reason!r})"

    def __del__(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drop(self)

    @property
    def finish_reason(self) -> str | None:
        """None while the request waits or runs, then "stop", "length", "error" or "cancelled"."""
        if self.failure is not None:
            return "error"
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def ended(self) -> bool:
        """Whether the request has its last output chunk, or has failed."""
        return self.failure is not None or bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def completion_tokens(self) -> int:
        """Number of tokens sampled so far."""
        chunks = self.chunks
        return len(chunks) - bool(chunks and chunks[-1].token_id is None)

    @cached_property
    def kind(self) -> str:
        """Kind of decode pass that the request needs."""
        return step_kind(self.params)

    # ---- methods for the caller

    def __iter__(self) -> Iterator[OutputChunk]:
        """Yield an output chunk for each token, then the last one, which has finish_reason, usage and timings.

        Raises the error of the pass that read the prompt, such as out of memory, or of the reader.
        """
        chunks, taken = self.chunks, 0
        ready = lambda: len(chunks) > taken or self.failure is not None  # noqa: E731
        try:
            for taken in count():
                if len(chunks) == taken:
                    self.driver.wait(ready)
                if len(chunks) == taken and self.failure is not None:
                    raise self.failure
                yield (chunk := chunks[taken])
                if chunk.finish_reason is not None:
                    return
        finally:
            self.driver.drop(self)

    def result(self) -> Result:
        """Wait for the end and return the whole result. If its finish_reason is "error", its `error` gives the reason.

        Raises the error of the pass that read the prompt, such as out of memory, or of the reader.
        """
        try:
            self.driver.wait(lambda: self.ended)
        except BaseException:
            self.driver.drop(self)
            raise
        if self.failure is not None:
            raise self.failure
        *chunks, last = self.chunks
        assert last.finish_reason and last.usage and last.timings and self.params.seed is not None
        return Result(
            text="".join(chunk.text for chunk in self.chunks),
            token_ids=tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            seed=self.params.seed,
            logprobs=None if self.params.logprobs is None else tuple(p.logprobs for p in chunks if p.logprobs),
            error=last.error,
        )

    def cancel(self) -> bool:
        """End the request now, with a last output chunk of finish_reason "cancelled", and free its slot and pages.

        Returns False and does nothing if the request has ended already, so a second call is harmless.
        """
        return self.driver.cancel(self)

    def drop(self) -> None:
        """Cancel the request without waiting for a pass: the next step ends it."""
        self.driver.drop_later(self)

    # ---- methods for the scheduler

    def resume(self, tokenizer: Tokenizer | None) -> None:
        """Restore `tokens` and the text to their state after the last of `chunks`.

        An error of the reader ends the request.
        """
        if not self.scores:
            del self.tokens[self.prompt_tokens + len(self.chunks) :]
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and not self.scores:
            before = self.tokens[: self.prompt_tokens] if self.continues else ()
            self._detokenizer = tokenizer.detokenizer(before)
        self._reader: Reader | None = None
        self._reader_hit: str | None = None
        self._stops = StopStrings(() if self.reader else self.params.stop)
        # Text omits special tokens, but a stop string may contain some.
        self._special = {} if tokenizer is None else tokenizer.special_tokens_in(self.params.stop)
        try:
            self._reader = self.reader() if self.reader else None
            for token in [chunk.token_id for chunk in self.chunks if chunk.token_id is not None]:
                self._text(token)
        except Exception as error:  # The reader is code of the caller.
            self.fail(error)

    def push(self, token: int, logprobs: TokenLogprobs | None, last: bool = False) -> None:
        """Append a sampled token, or end the request with the error of its reader.

        `last` means that the request's grammar ends the output with this token.
        """
        self.first = self.first or time.perf_counter()
        if not self.scores:
            self.tokens.append(token)
        expected = self.prompt_tokens if self.scores else self.limit - self.prompt_tokens
        stopped = token in self.stop_ids
        hidden = stopped and token not in self._special
        try:
            chunk = OutputChunk(token, "" if hidden else self._text(token), logprobs)
        except Exception as error:  # The reader is code of the caller.
            self.fail(error)
            return
        if stopped or last or self._hit:
            self.end("stop", chunks=[chunk])
        elif len(self.chunks) + 1 == expected:
            self.end("length", chunks=[chunk])
        else:
            self.chunks.append(chunk)

    def fail(self, error: Exception) -> None:
        """End the request with an error.

        The error keeps the text of its traceback as a note, but not the frames, because they refer to tensors.
        """
        self.failure = error
        chain: list[BaseException] = [error]
        with suppress(Exception):  # An error of a caller's class may refuse attributes.
            error.add_note("".join(["In a step of the engine:\n", *traceback.format_tb(error.__traceback__)]).rstrip())
            for each in chain:
                each.__traceback__ = None
                chain += [cause for cause in (each.__cause__, each.__context__) if cause and cause not in chain]

    @property
    def _hit(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.hit if self._reader is None else self._reader_hit

    def _text(self, token: int) -> str:
        """Return the text that a token completes. The text ends before a stop string, unless a reader searches it."""
        if self._detokenizer is None:
            return ""
        if self._reader is not None:
            text = self._detokenizer.push(token)
            self._reader.feed(token, text)
            self._reader_hit = self._reader.hit
            return text
        if token in self._special:
            return self._stops.push(self._special[token], visible=False)
        return self._stops.push(self._detokenizer.push(token))

    def end(self, reason: str, error: str | None = None, chunks: Sequence[OutputChunk] = ()) -> None:
        """Append `chunks` and a last output chunk with the rest of the text. No interrupt can divide this operation."""
        tail, now = "", time.perf_counter()
        if self._detokenizer is not None and not self._hit:
            tail = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        tokens, first = len(self.chunks) + len(chunks), self.first or now
        decode = now - first
        rate = (tokens - 1) / decode if tokens > 1 and decode > 0 else 0.0
        last = OutputChunk(
            None,
            tail,
            finish_reason=reason,
            usage=Usage(self.prompt_tokens, self.reused or 0, tokens, self.drafted, self.accepted),
            timings=Timings(first - self.started, decode, rate),
            error=error,
            stop_string=self._hit,
        )
        self.chunks.extend((*chunks, last))


def scoring(
    ids: "array[int]", started: float, logprobs: int | None = None, logits: torch.Tensor | None = None,
    adapter: "Adapter | None" = None, cache_salt: str = "",
) -> Request:  # fmt: skip
    """Return a request for the probability of each token of `ids`, as logits or as log-probabilities."""
    params = SamplingParams(temperature=0, seed=0, logprobs=logprobs)
    salt = cache_salt if adapter is None else (adapter.serial, cache_salt)
    return Request(
        ids, params, (), len(ids) + 1, started, reuse_prefix=False, salt=salt, adapter=adapter, scores=True,
        logits=logits,
    )  # fmt: skip


def step_kind(params: SamplingParams) -> str:
    """Return the kind of pass (decode.KINDS) that serves `params`."""
    if params.logprobs is not None:
        return "logprobs"
    return "greedy" if params.greedy else "sample"


def checked_stop_ids(params: SamplingParams, spec: "ModelSpec") -> tuple[int, ...]:
    """Return the token ids that end a generation: stop_token_ids, and the model's own unless ignore_eos is set.

    Raises:
        ParameterError: there are too many stop ids, or an id of stop_token_ids or logit_bias is not in the vocabulary.
    """
    own = () if params.ignore_eos else spec.stop_ids
    stop_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        message = f"stop_token_ids: at most {MAX_STOP_IDS} with the model's own, got {len(stop_ids)}"
        raise ParameterError(message, "stop_token_ids", "range")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= spec.vocab_size:
                raise conflict(name, f": token id {token} is not in the vocabulary of {spec.vocab_size}")
    return stop_ids
