"""Engine: requests of a loaded model; stream answers, score tokens."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from .arguments import Flag, Text, function, mapping, shown
from .errors import GenerationError, ParameterError, PromptError, counted
from .loading import Loaded
from .plan import threads
from .results import Piece, Result
from .sampling import SamplingParams
from .serve.driver import Driver
from .serve.request import Request, checked_stop_ids, scoring
from .serve.scheduler import Scheduler
from .step.dispatch import Dispatcher, GraphStat
from .step.graphs import make_steps
from .step.prompt_graphs import make_prompts
from .text.grammar import Grammars
from .text.prompt import Encoded, Prompt, listed, prompt_ids

FLAG, TEXT = Flag(), Text()
FIRST_TURN = 64  # tokens of a prompt whose passes a one-slot engine captures before it is ready


@dataclass(repr=False)
class Engine(Loaded):
    """A loaded model with its captured step.

    As many requests run at a time as there are slots, others wait for one, in the order in which they came, from
    whichever thread. What requests before have left of K/V, those that follow find.
    """

    def __post_init__(self):
        graphs = self.graphs
        dispatcher = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention)
        self.steps = make_steps(self.model, self.backend, dispatcher, graphs.attention)
        self.prompts = make_prompts(self.model, self.steps, self.backend, graphs.prompt_attention)
        self.prompts.capture_all(None if self.slots > 1 or self.plan.options.batch_invariant else FIRST_TURN)
        ahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        runners = (lambda: self.steps), (lambda: self.prompts)  # those of now: benchmarks put others in their place
        scheduler = Scheduler(self.model, self.tokenizer, *runners, ahead, self.policy)
        self._grammars = Grammars(self.tokenizer, self.config.vocab_size, self.config.stop_ids)
        self._driver = Driver(scheduler, lambda: threads.use(self.threads))

    def close(self) -> None:
        """Cancel what runs or waits, and give the memory back. Later calls raise EngineClosed."""
        if self.model is not None:
            self._driver.close()
            with suppress(RuntimeError):  # a lost GPU writes no more
                self.synchronize()
            self.model = self.steps = self.prompts = None  # type: ignore[assignment]  # only after `close`

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def scheduler(self) -> Scheduler:
        return self._driver.opened()

    def capture_next(self) -> bool:
        """Capture one more size of prompt passes, or passes that verify drafts, unless something runs; False where none
        is left. An engine of several slots has captured all of the former at load, one of one slot those of a first
        turn; whoever has time may do the rest."""
        if self.scheduler.busy:  # its lock is left to those who step
            return True
        capture = lambda: self.prompts.capture_next() or self.steps.capture_next()  # noqa: E731
        return self._driver.exclusively(lambda scheduler: scheduler.busy or capture())

    def graph_stats(self) -> list[GraphStat]:
        """What the decode passes so far were: their rows, those that they were padded to, and how they ran."""
        self._open()
        return self.steps.dispatcher.stats()

    def default_params(self, **overrides) -> SamplingParams:
        """SamplingParams of the model's generation_config, with `overrides`."""
        return SamplingParams(**{**dict(self.config.generation_defaults), **overrides})

    def _params(self, params) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be a SamplingParams or None, got {shown(params)}", "params", "type")
        return self.default_params() if params is None else params

    def encode(self, prompt: Prompt, template_variables: dict | None = None) -> list[int]:
        """Token ids of a prompt: text as it is, ids, or chat messages through the template. Raises PromptError."""
        return self.prepare(prompt, template_variables).ids

    def prepare(self, prompt: Prompt, template_variables: dict | None = None) -> Encoded:
        """A prompt in the form in which several requests can have it, encoded once. Raises PromptError."""
        variables = mapping("template_variables", template_variables)
        limits = self.config.vocab_size, self.capacity, self.config.max_position
        return prompt_ids(prompt, variables, self.tokenizer, *limits)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Put a request in the queue, from any thread; see Request and `stream`. cache_salt: it shares K/V with those
        of the same one only. Raises PromptError, ParameterError, QueueFull and EngineClosed."""
        return self._driver.submit(self._request(prompt, params, reuse_prefix, template_variables, cache_salt))

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until one of the requests has ended; its result() says how. For none there is nothing to wait for."""
        if not isinstance(requests, Sequence) or not all(isinstance(request, Request) for request in requests):
            raise ParameterError(f"requests must be a list of what submit gave, got {shown(requests)}")
        self._driver.wait(lambda: not requests or any(request.finish_reason for request in requests))

    def step(self) -> bool:
        """Run one pass for whatever runs or waits; False where nothing does afterwards. For a thread that owns the
        device and does nothing else: who waits for a request steps by that already."""
        return self._driver.step()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Iterator[Piece]:
        """Yield a Piece a token, then a last one with finish_reason, usage and timings.

        prompt: text (raw), token ids, or chat messages. params None: the model's own defaults. reuse_prefix: use the
        K/V of the longest beginning that requests before have left. template_variables: plain JSON values that the chat
        template reads, like {"enable_thinking": False}. Closing the iterator early cancels the request. Raises what
        `submit` does, before the first piece.
        """
        return iter(self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables))

    def _request(self, prompt, params, reuse_prefix, template_variables, cache_salt="") -> Request:
        started = time.perf_counter()
        self._open()
        params = self._params(params)
        FLAG.check("reuse_prefix", reuse_prefix)
        tokens, chat = self.prepare(prompt, template_variables)
        salt, grammar = TEXT.check("cache_salt", cache_salt), self._grammars.of(params)
        stop_ids = checked_stop_ids(params, self.config)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        limit = min(len(tokens) + (params.max_tokens or self.capacity), self.capacity + 1)
        own = tokens[:]  # several requests may have the same prompt
        return Request(own, params, stop_ids, limit, started, not chat, reuse_prefix, salt, grammar)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Result:
        """The whole of a stream; see `stream`. With finish_reason "error", `error` says why."""
        return self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables).result()

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None | Sequence[SamplingParams | None] = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> list[Result]:
        """The results of many prompts in their order, as many at a time as there are slots.

        params: for all, or a list of one for each. progress(done_requests, total_requests) is called as they end. What
        is wrong with a request, its prompt or parameters included, is its own result's alone: finish_reason "error",
        and `error` says why. Raises ParameterError where the lists themselves are wrong.
        """
        if (several := listed(prompts)) is None:
            message = "prompts must be a list of prompts; for one prompt there is generate"
            raise ParameterError(message, "prompts", "type")
        each = list(params) if isinstance(params, list | tuple) else [self._params(params)] * len(several)
        if len(each) != len(several):
            message = f"params: a list has one for each of {counted(len(several), 'prompt')}, got {len(each):,}"
            raise ParameterError(message, "params", "range")
        function("progress", progress)
        FLAG.check("reuse_prefix", reuse_prefix)
        self._open()
        options = {"reuse_prefix": reuse_prefix, "template_variables": template_variables}
        make = [partial(self._request, prompt, own, **options) for prompt, own in zip(several, each)]
        return self._driver.gather(make, progress)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 logits [tokens, vocab] on the model's device; row i predicts token i + 1. Runs the decode step, in a
        slot as any request does.

        Raises PromptError for ids outside the vocabulary or more than the context, GenerationError for NaN or Inf and
        if it is cancelled, EngineClosed if that is so.
        """
        if (ids := listed(token_ids)) is None:
            raise PromptError(f"token_ids must be a sequence of token ids, got {shown(token_ids)}")
        tokens = self.prepare(ids).tokens
        logits = torch.empty(len(tokens), self.config.vocab_size, device=self.device)
        result = self._driver.submit(scoring(tokens, time.perf_counter(), logits=logits)).result()
        if result.error:
            raise GenerationError(result.error)
        if result.finish_reason == "cancelled":
            self._driver.opened()
            raise GenerationError("score was cancelled before all logits were there")
        return logits

    def submit_score(self, prompt: Prompt, logprobs: int) -> Request:
        """A request whose pieces tell of each token after the prompt's first one how likely it was, with the `logprobs`
        likeliest, and of the one that would follow; see `submit` and `score`."""
        return self._driver.submit(scoring(self.prepare(prompt).tokens, time.perf_counter(), logprobs))

    def synchronize(self) -> None:
        """Wait until everything enqueued has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
