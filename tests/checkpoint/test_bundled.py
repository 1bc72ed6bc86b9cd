"""Files of the bundled model: complete, small enough and consistent."""

import json
import re
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

BUNDLED = Path(__file__).parents[2] / "tridecode" / "bundled"
TRAINING = Path(__file__).parents[2] / "training"


def read(name):
    return json.loads((BUNDLED / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def template():
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((BUNDLED / "chat_template.jinja").read_text(encoding="utf-8"))


def test_weights_match_the_config_and_the_size_limit():
    assert (BUNDLED / "model.safetensors").stat().st_size <= 15_000_000
    config = read("config.json")
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert config["max_position_embeddings"] >= 1024
    with safe_open(BUNDLED / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(names) == 2 + 11 * config["num_hidden_layers"] and "lm_head.weight" not in names


def test_any_text_survives_a_round_trip(tokenizer):
    for text in (
        "café 😀", "Привет, 你好, こんにちは, مرحبا, नमस्ते", "👩‍👩‍👧‍👦 \u200b\u00a0 \ufeff",
        "tab\tand\r\nlines\n\n  two  spaces ", "\x00\x01\x7f", "", " ", "\U0001f600" * 20,
    ):  # fmt: skip
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer):
    assert all(len(tokenizer.encode(chr(code)).ids) >= 1 for code in range(256))
    assert 4096 <= tokenizer.get_vocab_size() <= 8192
    assert tokenizer.get_vocab_size() == read("config.json")["vocab_size"]


def test_digits_are_split_one_by_one(tokenizer):
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("In 1969 and 27+30=57, 3.14").ids]
    assert all(len(piece.strip()) == 1 for piece in pieces if any(char.isdigit() for char in piece))
    digits = [token for token in tokenizer.get_vocab() if any(char in "0123456789" for char in token)]
    assert sorted(digits) == list("0123456789")


def test_special_ids_agree(tokenizer):
    config, generation = read("config.json"), read("generation_config.json")
    settings = read("tokenizer_config.json")
    assert tokenizer.token_to_id(settings["eos_token"]) == config["eos_token_id"] == generation["eos_token_id"][0]
    assert tokenizer.token_to_id(settings["pad_token"]) == config["pad_token_id"] == generation["pad_token_id"]
    assert set(generation["eos_token_id"]) == {
        tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")
    }
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert tokenizer.encode(special).ids == [tokenizer.token_to_id(special)]


def test_template(template):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(messages=messages, add_generation_prompt=True) == text + "<|im_start|>assistant\n"
    answered = [*messages, {"role": "assistant", "content": "Hello!"}]
    assert template.render(messages=answered, add_generation_prompt=False) == (
        text + "<|im_start|>assistant\nHello!<|im_end|>\n"
    )


def test_notice_credits_sources_and_authors():
    notice = (BUNDLED / "NOTICE").read_text(encoding="utf-8")
    for name in (
        "TinyStories", "African Storybook", "Pratham Books", "FairytaleQA", "Synthetic-Persona-Chat", "Self-dialogue",
        "Topical-Chat", "Taskmaster", "Personality Chat", "WordNet", "Ursula Nafula",
    ):  # fmt: skip
        assert name in notice


def test_held_out_exchanges_are_not_in_the_training_data(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    import exchanges
    import generator

    def plain(text):
        return re.sub(r"[^a-z0-9+= ]", "", text.lower()).strip()

    held_out = {
        plain(exchange.messages[-1]["content"])
        for kind in ("sums", "where")
        for exchange in exchanges.held_out_exchanges(kind, 300, seed=1)
    }
    chats = list(generator.generate(3000, seed=1))
    assert not held_out & {plain(message["content"]) for chat in chats for message in chat}
    for chat in chats:
        told = set(plain(" ".join(message["content"] for message in chat if message["role"] == "user")).split())
        replies = " ".join(message["content"] for message in chat if message["role"] == "assistant")
        for name in re.findall(r"Your name is (\w+)", replies):
            assert not any(exchanges.held_out("recall", name, color) for color in exchanges.COLORS if color in told)


def test_evaluation_prompts_are_not_in_the_training_data(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    import generator

    assert len(generator.FREE_PROMPTS) == 30
    prompts = {generator.plain(prompt) for prompt in generator.FREE_PROMPTS}
    messages = [message for chat in generator.generate(3000, seed=2) for message in chat]
    assert not prompts & {generator.plain(message["content"]) for message in messages if message["role"] == "user"}


def test_model_card_matches_the_verdicts(monkeypatch):
    """The counts in the card and in both READMEs match the verdicts, and each chat has a verdict."""
    monkeypatch.syspath_prepend(str(TRAINING))
    import sixty_chats
    from content import sections

    asked = [(kind, chat.split(" => ")) for kind, chats in sections("sixty_chats.txt").items() for chat in chats]
    results = sixty_chats.RESULTS.read_text(encoding="utf-8")
    judged = sixty_chats.parts(results)
    assert len(judged) == len(asked) == 60 and sixty_chats.summary(judged) in results
    for number, ((kind, turns), (chat, verdict)) in enumerate(zip(asked, judged), 1):
        as_messages = [line for line in chat.splitlines()[1:] if line and not line.startswith(">")]
        assert chat.startswith(f"## {number}: {kind}\n") and as_messages == turns and chat.count("\n\n> ") == len(turns)
        assert verdict == "yes." or verdict.startswith(("yes (", "no: ")), f"{number}: {verdict}"
    counts = dict(line.strip("| ").split(" | ") for line in sixty_chats.summary(judged).splitlines()[2:])
    total = counts.pop("all")
    card = (BUNDLED / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(counts)} |" in card and f"| {' | '.join(counts.values())} |" in card
    for text in (card, (TRAINING / "README.md").read_text(encoding="utf-8")):
        assert total in " ".join(text.split())
    readme = (TRAINING.parent / "README.md").read_text(encoding="utf-8")
    assert f"answered {total.strip('*').split()[0]} correctly" in " ".join(readme.split())
