"""A Result as JSON has it."""

from dataclasses import asdict
from functools import partial

from ...engine import Engine
from ...errors import GenerationError
from ...results import Result
from ...text.tokenizer import Tokenizer
from ..explain import explain
from ..loading import tokenizer_of


def report(result: Result, engine: Engine) -> dict:
    """A Result as JSON has it: ASCII only once dumped, so no separator that some reader takes for a line's end."""
    found = {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage) | {"tokens_per_pass": round(result.usage.tokens_per_pass, 3)},
        "timings": asdict(result.timings),
        "seed": result.seed,
    }
    if result.logprobs is not None:
        entry = partial(logprob_entry, tokenizer_of(engine))
        found["logprobs"] = [
            entry(token, each.logprob) | {"top": [entry(*top) for top in each.top]}
            for token, each in zip(result.token_ids, result.logprobs)
        ]
    if result.error is not None:
        found["error"] = explain(GenerationError(result.error))
    return found


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    detokenizer = tokenizer.detokenizer((token,), skip_special=False)  # after another token: its space stays
    detokenizer.flush()
    return {"token_id": token, "text": detokenizer.push(token) + detokenizer.flush(), "logprob": logprob}
