"""Answers in OpenAI's published forms, whole and in chunks, with every field that those require."""

import secrets
import time

from ..results import TokenLogprobs
from ..text.thinking import THINKING
from ..text.tokenizer import Tokenizer
from . import events
from .choice import Choice, Said
from .errors import ApiError
from .tools.parser import ARGUMENTS, NAME, TEXT

IMPOSSIBLE = -9999.0  # the log-probability of what cannot be: JSON has no infinity


class Shape:
    """How an API says what an answer is: whole, or as the events of a stream.

    n: answers a prompt; with_logprobs: they have been asked for; with_usage: a stream ends with it; with_ids: choices
    have token_ids.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, *, n: int = 1, with_logprobs: bool = False,
                 with_usage: bool = False, with_ids: bool = False):  # fmt: skip
        self.model, self.tokenizer, self._n = model, tokenizer, n
        self._with_logprobs, self._with_usage, self._with_ids = with_logprobs, with_usage, with_ids

    def whole(self, choices: list[Choice], said: list[Said]) -> dict:
        raise NotImplementedError

    def opening(self, prompts: list[int]) -> bytes:
        """What a stream begins with; prompts: how many tokens each has."""
        return b""

    def news(self, number: int, choice: Choice, said: Said) -> bytes:
        """What pieces have brought to the choice of this number."""
        raise NotImplementedError

    def closing(self, choices: list[Choice]) -> bytes:
        raise NotImplementedError

    def failure(self, problem: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return events.event(problem.body()) + events.DONE

    def refusal(self, problem: ApiError) -> dict:
        """The body of a response that is an error."""
        return problem.body()


class OpenAI(Shape):
    """What chats and completions share."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": self.model, "system_fingerprint": None}

    def choice(self, number: int, choice: Choice, said: Said) -> dict:
        raise NotImplementedError

    def deltas(self, number: int, choice: Choice, said: Said) -> list[dict]:
        raise NotImplementedError

    def whole(self, choices: list[Choice], said: list[Said]) -> dict:
        made = [self.choice(i, choice, choice.settle(said[i])) for i, choice in enumerate(choices)]
        return self._head | {"object": self.whole_object, "choices": made, "usage": usage(choices, self._n)}

    def news(self, number: int, choice: Choice, said: Said) -> bytes:
        ids = self._with_ids and said.token_ids
        if not (said.events or said.logprobs or ids or choice.finish_reason) and choice.begun:
            return b""
        made = self.deltas(number, choice, said)
        choice.begun = True
        return b"".join(events.event(self._chunk([delta])) for delta in made)

    def closing(self, choices: list[Choice]) -> bytes:
        last = events.event(self._chunk([], usage(choices, self._n))) if self._with_usage else b""
        return last + events.DONE

    def _chunk(self, choices: list[dict], usage: dict | None = None) -> dict:
        made = self._head | {"object": self.chunk_object, "choices": choices}
        return made | {"usage": usage} if self._with_usage else made

    def _token(self, token: int) -> tuple[str, bytes]:
        data = self.tokenizer.token_bytes(token)
        return data.decode(errors="replace"), data

    def _ids(self, choice: dict, ids: list[int]) -> dict:
        return choice | {"token_ids": ids} if self._with_ids else choice


class ChatShape(OpenAI):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._calls: dict[int, int] = {}  # by choice, how many have begun

    def choice(self, number: int, choice: Choice, said: Said) -> dict:
        calls = []
        for kind, text in said.events:
            if kind == NAME:
                calls.append(_call(text))
            elif kind == ARGUMENTS:
                calls[-1]["function"]["arguments"] += text
        content = said.text(TEXT)
        message: dict[str, object] = {"role": "assistant", "content": content if content or not calls else None}
        message |= {"refusal": None, "annotations": None} | ({"tool_calls": calls} if calls else {})
        if self.tokenizer.thinks:
            message["reasoning_content"] = said.text(THINKING) or None
        logprobs = self._logprobs(said.logprobs) if self._with_logprobs else None
        made = {"index": number, "message": message, "logprobs": logprobs, "finish_reason": _reason(choice)}
        return self._ids(made, said.token_ids)

    def deltas(self, number: int, choice: Choice, said: Said) -> list[dict]:
        """One for text and thinking together, then one for each piece of a call; the last says how it ended."""
        parts: list[dict] = []
        for kind, text in said.events:
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
        if not choice.begun:
            content = None if parts[0].get("reasoning_content") or "tool_calls" in parts[0] else ""
            parts[0] = {"role": "assistant", "content": content} | parts[0]
        logprobs = self._logprobs(said.logprobs) if self._with_logprobs and said.logprobs else None
        made: list[dict] = [{"index": number, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        made[0] = self._ids(made[0] | {"logprobs": logprobs}, said.token_ids)
        made[-1]["finish_reason"] = _reason(choice)
        return made

    def _logprobs(self, found: list[tuple[int, TokenLogprobs | None, int]]) -> dict:
        content = [
            self._entry(token, own.logprob) | {"top_logprobs": [self._entry(*top) for top in own.top]}
            for token, own, _ in found
            if own is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, IMPOSSIBLE), "bytes": list(data)}


class CompletionShape(OpenAI):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, number: int, choice: Choice, said: Said) -> dict:
        return self._made(number, choice, said, self._with_logprobs)

    def deltas(self, number: int, choice: Choice, said: Said) -> list[dict]:
        return [self._made(number, choice, said, self._with_logprobs and bool(said.logprobs))]

    def _made(self, number: int, choice: Choice, said: Said, with_logprobs: bool) -> dict:
        logprobs = self._logprobs(said.logprobs) if with_logprobs else None
        made = {"index": number, "text": said.text(TEXT), "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return self._ids(made, said.token_ids)

    def _logprobs(self, found: list[tuple[int, TokenLogprobs | None, int]]) -> dict:
        return {
            "tokens": [self._token(token)[0] for token, _, _ in found],
            "token_logprobs": [own and max(own.logprob, IMPOSSIBLE) for _, own, _ in found],
            "top_logprobs": [
                own and {self._token(token)[0]: max(value, IMPOSSIBLE) for token, value in own.top}
                for _, own, _ in found
            ],
            "text_offset": [offset for _, _, offset in found],
        }


def _call(name: str) -> dict:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}


def _reason(choice: Choice) -> str | None:
    return "tool_calls" if choice.finish_reason == "stop" and choice.called else choice.finish_reason


def usage(choices: list[Choice], n: int) -> dict:
    """Tokens of a request: those of a prompt count once for all its `n` answers."""
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
