"""Generation defaults: the keys of generation_config.json that replace the defaults of SamplingParams."""

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import CheckpointError, ParameterError, as_json
from ..sampling import SamplingParams
from .reader import ConfigReader, is_integer

# Keys of generation_config.json, and the fields of SamplingParams that they set.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
_NEVER = -1e30  # The bias of a token that is never sampled.
# Keys that change the answers of transformers and are not supported, and the value with which they change nothing.
_UNSUPPORTED = {
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "top_h": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "diversity_penalty": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1,
    "watermarking_config": None,
    "penalty_alpha": 0,
    "dola_layers": None,
}


def generation_defaults(
    read: ConfigReader, vocab_size: int, max_position: int
) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """Return pairs of a SamplingParams field and its value, and notes for the user.

    The notes name the keys without effect, because the value is out of range or the key is not supported.

    Args:
        read: generation_config.json. Without this file, config.json, which older checkpoints use.
        vocab_size: number of token ids of the model.
        max_position: longest context of the model, in tokens.
    """
    fields: dict[str, Any] = {}
    notes: list[str] = []

    def ignore(problem: object) -> None:
        notes.append(f"{problem}; it is ignored, correct it there")

    for key, field in _FIELDS.items():
        if (value := read.get(key)) is None:
            continue
        try:
            params = SamplingParams(**{field: value})
        except ParameterError as error:
            ignore(f"{read.source}: {key}{str(error).removeprefix(field)}")
        else:
            fields[field] = getattr(params, field)
    try:
        if not read.flag("do_sample", default=True):  # If do_sample is absent, the other values apply.
            fields["temperature"] = 0.0
    except CheckpointError as error:
        ignore(error)
    words, end = dict(_single_words(read.get("bad_words_ids"))), read.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]  # transformers does not exclude them as words.
    never = {token for token in words.values() if token not in ends} | {*_token_ids(read, "suppress_tokens", ignore)}
    if biases := tuple((token, _NEVER) for token in sorted(never) if 0 <= token < vocab_size):
        fields["logit_bias"] = biases
    unsupported = {key: value for key in _UNSUPPORTED if (value := _effect(read, key)) is not None}
    if "bad_words_ids" in unsupported and len(words) == len(unsupported["bad_words_ids"]):
        del unsupported["bad_words_ids"]
    length = read.get("max_length")
    if length is not None and "max_tokens" not in fields and not (is_integer(length) and length >= max_position):
        unsupported["max_length"] = length
    if unsupported:
        listed = ", ".join(f"{key} {as_json(value)}" for key, value in unsupported.items())
        notes.append(
            f"{read.source}: {listed}: not supported and without effect; answers may differ from transformers'"
        )
    return tuple(fields.items()), tuple(notes)


def _effect(read: ConfigReader, key: str) -> Any:
    """Return the value of an unsupported key, or None if it changes nothing."""
    value = read.get(key)
    return None if value in (_UNSUPPORTED[key], [], {}) else value


def _single_words(words: Any) -> Iterator[tuple[int, int]]:
    """Yield the index and the token of each entry of bad_words_ids that is a single token."""
    for i, word in enumerate(words if isinstance(words, list) else ()):
        if isinstance(word, list) and len(word) == 1 and is_integer(word[0]):
            yield i, word[0]


def _token_ids(read: ConfigReader, key: str, ignore: Callable[[object], None]) -> list[int]:
    """Return a list of token ids, also outside the vocabulary; empty if the key is absent or invalid."""
    value = read.get(key, [])
    if isinstance(value, list) and all(map(is_integer, value)):
        return value
    ignore(read.fail(key, "a list of token ids"))
    return []
