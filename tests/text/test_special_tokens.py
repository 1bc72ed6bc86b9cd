"""Tests of tokens that tokenizer.json lacks and another file of the checkpoint declares."""

import json
import logging

import pytest
import tokenizers
from checkpoints import (
    ADDED_TOKENS,
    CHATML,
    EOS_ID,
    SPECIAL_TOKENS,
    TOKENIZER_VOCAB_SIZE,
    write_tiny,
    write_tokenizer,
)

from tridecode import Engine, SamplingParams
from tridecode.errors import CheckpointError
from tridecode.layout import MAX_STOP_IDS
from tridecode.text.tokenizer import Tokenizer

TEXT = "<|im_start|>user\nHi <think> </tool> <img> <extra><|im_end|>\n"
MARKS = {"content": "<|im_start|>", "normalized": False, "special": True}, {"content": "<|im_end|>", "special": True}
THINK, END_THINK = ({"content": text, "normalized": False, "special": False} for text in ADDED_TOKENS)


def numbered(*tokens: dict) -> dict:
    """Return added_tokens_decoder with the ids that the tokens have in the vocabulary, or the next ones."""
    first = TOKENIZER_VOCAB_SIZE - 2
    ids = {token: i for i, token in enumerate(SPECIAL_TOKENS)} | {"<think>": first, "</think>": first + 1}
    return {str(ids.get(token["content"], first + 2)): token for token in tokens}


# name: {file: keys}
DECLARED = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {"added_tokens_decoder": numbered(*MARKS, THINK, END_THINK, {"content": "</tool>"})}
    },
    "added_tokens_decoder with one of them": {"tokenizer_config.json": {"added_tokens_decoder": numbered(MARKS[0])}},
    "other flags": {"tokenizer_config.json": {"added_tokens_decoder": numbered(THINK | {"special": True})}},
    "added_tokens.json": {"added_tokens.json": {"<|im_start|>": 1, "<|im_end|>": 2, "<think>": 382, "</think>": 383}},
    "added_tokens.json and special_tokens_map.json": {
        "added_tokens.json": {"<|im_start|>": 1, "<|im_end|>": 2},
        "special_tokens_map.json": {"extra_special_tokens": ["<|im_start|>"], "unk_token": {"content": "<img>"}},
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {"extra_special_tokens": [{"content": "<|im_start|>", "normalized": False}]}
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<extra>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<|im_start|>", "<extra>"]}},
    "named tokens": {"tokenizer_config.json": {"image_token": "<img>", "pad_token": "<extra>"}},
    "extra_special_tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<img>"}}},
}


def write(path, files: dict) -> None:
    """Write a tokenizer without added tokens, and the files that declare them."""
    write_tokenizer(path, CHATML)
    state = json.loads((path / "tokenizer.json").read_text())
    state["added_tokens"] = []
    state["model"]["vocab"] |= {text: TOKENIZER_VOCAB_SIZE - 2 + i for i, text in enumerate(ADDED_TOKENS)}
    (path / "tokenizer.json").write_text(json.dumps(state))
    for name, values in files.items():
        old = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps(old | values))


@pytest.mark.parametrize("case", DECLARED)
def test_declared_tokens_match_transformers(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, DECLARED[case])
    reference, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert ours.encode(TEXT, allow_special=True) == reference(TEXT)["input_ids"]
    assert ours.special_ids == {i for i, token in reference.added_tokens_decoder.items() if token.special}
    assert ours.vocab_size == len(reference)
    chat = [{"role": "user", "content": "Hi"}]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == expected, "the markers of the chat are pieces of text"


def test_declared_control_tokens_in_text_are_characters(tmp_path):
    write(tmp_path, DECLARED["added_tokens_decoder"])
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(2) == 1 and "a<|im_end|>b" in tokenizer.decode(ids)


def test_template_reads_named_tokens_of_the_model(tmp_path):
    write_tokenizer(tmp_path, "{{ image_token }}{{ sound_token }}")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"image_token": "<img>", "extra_special_tokens": {"sound_token": "<snd>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids == [TOKENIZER_VOCAB_SIZE, TOKENIZER_VOCAB_SIZE + 1] and not tokenizer.template_variables


def test_contradictory_id_is_reported(tmp_path, caplog):
    write_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 500}')
    with caplog.at_level(logging.WARNING, "tridecode"):
        Tokenizer.load(tmp_path)
    (record,) = caplog.records
    assert f"'<tool>' has id 500, but tokenizer.json gives it id {TOKENIZER_VOCAB_SIZE}" in record.getMessage()


MALFORMED = {
    "no object": {"tokenizer_config.json": {"added_tokens_decoder": ["<x>"]}},
    "no id": {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "<x>"}}}},
    "no token": {"tokenizer_config.json": {"added_tokens_decoder": {"5": "<x>"}}},
    "no content": {"tokenizer_config.json": {"added_tokens_decoder": {"5": {"special": True}}}},
    "content of another type": {"tokenizer_config.json": {"added_tokens_decoder": {"5": {"content": 5}}}},
    "flag of another type": {"tokenizer_config.json": {"pad_token": {"content": "<x>", "lstrip": "yes"}}},
    "id of another type": {"added_tokens.json": {"<x>": "5"}},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_declaration_is_refused(case, tmp_path):
    write(tmp_path, MALFORMED[case])
    (file,) = MALFORMED[case]
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / file}: ") and "\n" not in str(caught.value)


def test_complete_tokenizer_is_unchanged(path):
    assert (
        Tokenizer.load(path).vocab_size == tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    )


@pytest.mark.parametrize("others", [None, 0], ids=["no other file names one", "other files name another"])
def test_eos_token_of_the_tokenizer_ends_an_answer(others, tmp_path):
    path = write_tiny(tmp_path, "qwen3", num_hidden_layers=1)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(values | {"eos_token_id": others}))
    with Engine.load(path, device="cpu") as engine:
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS_ID: 1e30})
        result = engine.generate([{"role": "user", "content": "Hi"}], params)
    assert (result.finish_reason, result.token_ids, result.text) == ("stop", (EOS_ID,), "")


def test_too_many_stop_ids_with_that_of_the_tokenizer(tmp_path):
    path = write_tiny(tmp_path, "qwen3", num_hidden_layers=1)
    ids = [*range(3, 3 + MAX_STOP_IDS)]
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"eos_token_id": ids}))
    (path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="eos_token"):
        Engine.load(path, device="cpu")
