"""Serializers that write answers as JSON or as events, with every field that OpenAI's schemas require."""

import secrets
import time

from ..results import TokenLogprobs, Usage
from ..sampling import SamplingParams
from ..text.thinking import THINKING
from ..text.tokenizer import Tokenizer
from ..version import __version__
from . import events
from .choice import Choice, Delta
from .errors import ApiError
from .tools.parser import ARGUMENTS, NAME, TEXT

FINGERPRINT = f"tridecode-{__version__}"  # Identifies the software, as in OpenAI's API.
NEGATIVE_INFINITY = -9999.0  # This number represents a log-probability of -inf, which JSON cannot express.


class Serializer:
    """Writes the answers of one API as a JSON response or as the events of a stream.

    Args:
        model: the name of the model in responses.
        n: number of answers to each prompt.
        with_logprobs: whether choices contain log-probabilities.
        with_usage: whether a stream ends with an event with the usage.
        continuous_usage: whether each event of a stream contains the usage so far.
        with_ids: whether choices contain token_ids.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, *, n: int = 1, with_logprobs: bool = False,
                 with_usage: bool = False, continuous_usage: bool = False, with_ids: bool = False):  # fmt: skip
        self.model, self.tokenizer, self._n = model, tokenizer, n
        self._with_logprobs, self._with_usage, self._with_ids = with_logprobs, with_usage, with_ids
        self._continuous_usage = continuous_usage
        self.params = SamplingParams()  # The sampling parameters, which some responses contain.

    def response(self, choices: list[Choice], deltas: list[Delta]) -> dict:
        """Return the whole response; each delta contains the whole answer of its choice."""
        raise NotImplementedError

    def first_events(self, prompts: list[Usage]) -> bytes:
        """Return the events that begin a stream; `prompts` contains the usage of each prompt."""
        return b""

    def new_events(self, number: int, choice: Choice, delta: Delta) -> bytes:
        """Return the events of a delta of the choice with this number."""
        raise NotImplementedError

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the events that end a stream."""
        raise NotImplementedError

    def error_events(self, problem: ApiError) -> bytes:
        """Return the events that end a failed stream."""
        return events.event(problem.body()) + events.DONE

    def error_body(self, problem: ApiError) -> dict:
        """Return the body of an error response."""
        return problem.body()


class OpenAISerializer(Serializer):
    """Base of the serializers of chats and completions."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._prompt_tokens, self._completions = 0, dict[int, int]()
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def choice(self, number: int, choice: Choice, delta: Delta) -> dict:
        """Return a whole choice of a response."""
        raise NotImplementedError

    def deltas(self, number: int, choice: Choice, delta: Delta) -> list[dict]:
        """Return the choices of a stream's chunks for a delta."""
        raise NotImplementedError

    def response(self, choices: list[Choice], deltas: list[Delta]) -> dict:
        """Return the whole response."""
        results = [
            self.choice(i, choice, choice.restore_malformed_calls(deltas[i])) for i, choice in enumerate(choices)
        ]
        return self._head | {"object": self.whole_object, "choices": results, "usage": usage(choices, self._n)}

    def new_events(self, number: int, choice: Choice, delta: Delta) -> bytes:
        """Return the events of a delta; the first ones of a choice also if the delta is empty."""
        ids = self._with_ids and delta.token_ids
        if not (delta.events or delta.logprobs or ids or choice.finish_reason) and choice.sent:
            return b""
        chunks = self.deltas(number, choice, delta)
        choice.sent = True
        self._completions[number] = choice.completion_tokens
        return b"".join(events.event(self._chunk([choice_delta], self._usage_so_far())) for choice_delta in chunks)

    def first_events(self, prompts: list[Usage]) -> bytes:
        """Store the lengths of the prompts."""
        self._prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        return b""

    def _usage_so_far(self) -> dict | None:
        """Return the usage so far, if events contain it."""
        if not self._continuous_usage:
            return None
        completion = sum(self._completions.values())
        total = self._prompt_tokens + completion
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion, "total_tokens": total}

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the usage, if requested, and [DONE]."""
        last = events.event(self._chunk([], usage(choices, self._n))) if self._with_usage else b""
        return last + events.DONE

    def _chunk(self, choices: list[dict], usage: dict | None = None) -> dict:
        chunk = self._head | {"object": self.chunk_object, "choices": choices}
        return chunk | {"usage": usage} if self._with_usage else chunk

    def _token(self, token: int) -> tuple[str, bytes]:
        data = self.tokenizer.token_bytes(token)
        return data.decode(errors="replace"), data

    def _ids(self, choice: dict, ids: list[int]) -> dict:
        return choice | {"token_ids": ids} if self._with_ids else choice


class ChatSerializer(OpenAISerializer):
    """Writes the answers of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._calls: dict[int, int] = {}  # Number of a choice -> index of its latest tool call.

    def choice(self, number: int, choice: Choice, delta: Delta) -> dict:
        """Return a whole choice."""
        calls = []
        for kind, text in delta.events:
            if kind == NAME:
                calls.append(_call(text))
            elif kind == ARGUMENTS:
                calls[-1]["function"]["arguments"] += text
        content = delta.text(TEXT)
        message: dict[str, object] = {"role": "assistant", "content": content if content or not calls else None}
        message |= {"refusal": None, "annotations": []} | ({"tool_calls": calls} if calls else {})
        if self.tokenizer.supports_thinking:
            message["reasoning_content"] = delta.text(THINKING) or None
        logprobs = self._logprobs(delta.logprobs) if self._with_logprobs else None
        result = {"index": number, "message": message, "logprobs": logprobs, "finish_reason": _reason(choice)}
        return self._ids(result, delta.token_ids)

    def deltas(self, number: int, choice: Choice, delta: Delta) -> list[dict]:
        """Return one choice for text and thinking, one for each part of a call, and one with the finish_reason."""
        parts: list[dict] = []
        for kind, text in delta.events:
            if kind == NAME:
                self._calls[number] = self._calls.get(number, -1) + 1
                parts.append({"tool_calls": [{"index": self._calls[number]} | _call(text)]})
            elif kind == ARGUMENTS:
                parts.append({"tool_calls": [{"index": self._calls[number], "function": {"arguments": text}}]})
            else:
                name = "reasoning_content" if kind == THINKING else "content"
                if not parts or "tool_calls" in parts[-1]:
                    parts.append({})
                parts[-1][name] = parts[-1].get(name, "") + text
        parts = parts or [{}]
        if not choice.sent:
            content = None if parts[0].get("reasoning_content") or "tool_calls" in parts[0] else ""
            parts[0] = {"role": "assistant", "content": content} | parts[0]
        logprobs = self._logprobs(delta.logprobs) if self._with_logprobs and delta.logprobs else None
        chunks: list[dict] = [
            {"index": number, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        at = next((i for i, part in enumerate(parts) if part.get("content")), 0)
        chunks[at]["logprobs"] = logprobs
        chunks[0] = self._ids(chunks[0], delta.token_ids)
        return with_reason(chunks, {"delta": {}}, _reason(choice), bool(delta.events))

    def _logprobs(self, tokens: list[tuple[int, TokenLogprobs | None, int]]) -> dict:
        content = [
            self._entry(token, own.logprob) | {"top_logprobs": [self._entry(*top) for top in own.top]}
            for token, own, _ in tokens
            if own is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, NEGATIVE_INFINITY), "bytes": list(data)}


class CompletionSerializer(OpenAISerializer):
    """Writes the answers of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, number: int, choice: Choice, delta: Delta) -> dict:
        """Return a whole choice."""
        return self._choice(number, choice, delta, self._with_logprobs)

    def deltas(self, number: int, choice: Choice, delta: Delta) -> list[dict]:
        """Return one choice with the text and the log-probabilities of a delta, and one with the finish_reason."""
        chunk = self._choice(number, choice, delta, self._with_logprobs and bool(delta.logprobs))
        chunk["finish_reason"] = None
        return with_reason([chunk], {"text": ""}, choice.finish_reason, bool(delta.events))

    def _choice(self, number: int, choice: Choice, delta: Delta, with_logprobs: bool) -> dict:
        logprobs = self._logprobs(delta.logprobs) if with_logprobs else None
        reason = choice.finish_reason
        result = {"index": number, "text": delta.text(TEXT), "logprobs": logprobs, "finish_reason": reason}
        return self._ids(result, delta.token_ids)

    def _logprobs(self, tokens: list[tuple[int, TokenLogprobs | None, int]]) -> dict:
        return {
            "tokens": [self._name(token) for token, _, _ in tokens],
            "token_logprobs": [own and max(own.logprob, NEGATIVE_INFINITY) for _, own, _ in tokens],
            "top_logprobs": [own and self._top(token, own) for token, own, _ in tokens],
            "text_offset": [offset for _, _, offset in tokens],
        }

    def _top(self, token: int, own: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the sampled token and of the most likely ones, by name."""
        top = {self._name(token): max(own.logprob, NEGATIVE_INFINITY)}
        for other, value in own.top:
            if other != token:
                name = self._name(other)
                top[f"token_id:{other}" if name in top else name] = max(value, NEGATIVE_INFINITY)
        return dict(sorted(top.items(), key=lambda item: -item[1]))

    def _name(self, token: int) -> str:
        """Return the text of a token; if it is not UTF-8, its bytes in the form of OpenAI's API."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def with_reason(chunks: list[dict], empty: dict, reason: str | None, text: bool) -> list[dict]:
    """Return the choices of a stream's chunks, with the finish_reason after all text.

    Args:
        chunks: the choices, whose finish_reason is None.
        empty: the field of a choice without text.
        text: whether the chunks contain text. If not, the last one gets the finish_reason.
    """
    if reason is not None and text:
        chunks.append({"index": chunks[0]["index"], "logprobs": None} | empty)
    chunks[-1]["finish_reason"] = reason
    return chunks


def _call(name: str) -> dict:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}


def _reason(choice: Choice) -> str | None:
    return "tool_calls" if choice.finish_reason == "stop" and choice.called else choice.finish_reason


def usage(choices: list[Choice], n: int) -> dict:
    """Return the usage of a request; the tokens of a prompt count once for all its `n` answers."""
    prompts = choices[::n]
    prompt = sum(choice.usage.prompt_tokens for choice in prompts)
    completion = sum(choice.usage.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.usage.reused_tokens for choice in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
