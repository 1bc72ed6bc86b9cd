"""Answers in OpenAI's published forms, whole and in chunks, with every field that those require."""

import secrets
import time

from ..results import Piece, TokenLogprobs, Usage
from ..text.thinking import THINKING, ThinkSplitter, ends_inside
from ..text.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0  # the log-probability of what cannot be: JSON has no infinity


class Choice:
    """One answer as it grows: text apart from thinking, log-probabilities, and how it ended."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int] | None, first_text: str = ""):
        """prompt: of a chat whose model may think; first_text: what stands before the text."""
        self._tokenizer, self._splitter = tokenizer, None
        if prompt is not None:
            opened = ends_inside(tokenizer.decode(prompt[-4:], skip_special=False))
            self._splitter = ThinkSplitter(opened)
        self._first_text, self._characters = first_text, 0
        self.begun = False  # something of it was sent
        self.finish_reason: str | None = None
        self.usage: Usage | None = None

    @property
    def reasoning_tokens(self) -> int:
        return self._splitter.tokens if self._splitter else 0

    def add(self, pieces: list[Piece]) -> dict:
        """What these pieces bring: content, reasoning, token_ids and logprobs, a list of (id, TokenLogprobs, offset of
        its text); of the last one finish_reason and usage are kept."""
        content, reasoning, logprobs, ids = self._first_text, "", [], []
        self._first_text = ""
        for piece in pieces:
            if piece.token_id is not None:
                ids.append(piece.token_id)
                if piece.logprobs is not None:
                    logprobs.append((piece.token_id, piece.logprobs, self._characters))
            self._characters += len(piece.text)
            pairs = [("", piece.text)]
            if self._splitter:
                pairs = self._splitter.feed(piece.text, int(piece.token_id is not None))
                if piece.finish_reason:
                    pairs += self._splitter.finish()
            for kind, text in pairs:
                if kind == THINKING:
                    reasoning += text
                else:
                    content += text
            if piece.finish_reason:
                self.finish_reason, self.usage = piece.finish_reason, piece.usage
        return {"content": content, "reasoning": reasoning, "token_ids": ids, "logprobs": logprobs}


class Shape:
    """What both endpoints' answers share. thinks: the model may, so answers have reasoning_content; with_ids: choices
    have token_ids."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, thinks: bool = False, with_ids: bool = False):
        self._tokenizer, self._thinks, self._with_ids = tokenizer, thinks, with_ids
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": None}

    def whole(self, choices: list[dict], usage: dict) -> dict:
        return self._head | {"object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict], with_usage: bool, usage: dict | None = None) -> dict:
        made = self._head | {"object": self.chunk_object, "choices": choices}
        return made | {"usage": usage} if with_usage else made

    def _token(self, token: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace"), data

    def _ids(self, choice: dict, ids: list[int]) -> dict:
        return choice | {"token_ids": ids} if self._with_ids else choice


class ChatShape(Shape):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, said: dict, reason: str, with_logprobs: bool) -> dict:
        message = {"role": "assistant", "content": said["content"], "refusal": None, "annotations": None}
        if self._thinks:
            message["reasoning_content"] = said["reasoning"] or None
        logprobs = self._logprobs(said["logprobs"]) if with_logprobs else None
        made = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return self._ids(made, said["token_ids"])

    def delta(self, index: int, said: dict, reason: str | None, first: bool, with_logprobs: bool) -> dict:
        delta = {"role": "assistant", "content": ""} if first else {}
        if said["content"]:
            delta["content"] = said["content"]
        if said["reasoning"]:
            delta["reasoning_content"] = said["reasoning"]
            if first and not said["content"]:
                delta["content"] = None
        logprobs = self._logprobs(said["logprobs"]) if with_logprobs and said["logprobs"] else None
        made = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._ids(made, said["token_ids"])

    def _logprobs(self, found: list[tuple[int, TokenLogprobs, int]]) -> dict:
        content = [
            self._entry(token, own.logprob) | {"top_logprobs": [self._entry(*top) for top in own.top]}
            for token, own, _ in found
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict:
        text, data = self._token(token)
        return {"token": text, "logprob": max(logprob, IMPOSSIBLE), "bytes": list(data)}


class CompletionShape(Shape):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, said: dict, reason: str | None, with_logprobs: bool) -> dict:
        logprobs = self._logprobs(said["logprobs"]) if with_logprobs else None
        made = {"index": index, "text": said["content"], "logprobs": logprobs, "finish_reason": reason}
        return self._ids(made, said["token_ids"])

    def delta(self, index: int, said: dict, reason: str | None, first: bool, with_logprobs: bool) -> dict:
        return self.choice(index, said, reason, with_logprobs and bool(said["logprobs"]))

    def _logprobs(self, found: list[tuple[int, TokenLogprobs, int]]) -> dict:
        return {
            "tokens": [self._token(token)[0] for token, _, _ in found],
            "token_logprobs": [max(own.logprob, IMPOSSIBLE) for _, own, _ in found],
            "top_logprobs": [
                {self._token(token)[0]: max(value, IMPOSSIBLE) for token, value in own.top} for _, own, _ in found
            ],
            "text_offset": [offset for _, _, offset in found],
        }


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
