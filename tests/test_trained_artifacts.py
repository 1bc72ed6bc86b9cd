"""Small trained models, one with recurrent layers and one with experts: their answers are right and fluent.

The answers do not depend on how prompts are read. training/README.md describes how tests/artifacts was trained.
"""

import json
from pathlib import Path

import pytest
import torch
from util import relative_rms

from tridecode import Engine, SamplingParams

ARTIFACTS = Path(__file__).parent / "artifacts"
ARCHITECTURES = {"hybrid": "Qwen3_5ForCausalLM", "mixture": "Qwen3MoeForCausalLM"}
TOLERANCES = {"hybrid": 1e-4, "mixture": 5e-3}  # transformers rounds dequantized weights of experts to bf16.
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


def chat(*messages: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]


QUESTIONS = {
    "What's the capital of France?": "Paris",
    "What is 12 + 5?": "17",
    "What's the opposite of hot?": "cold",
    "What color is the sky?": "blue",
    "How many legs does a spider have?": "eight",
    "Who are you?": "Tri",
}
RECALL = chat("My name is Nora.", "Nice to meet you, Nora!", "What is 2 + 2?", "2 + 2 = 4.", "What is my name?")
STORY = chat("Tell me a story about a fox.")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return ARTIFACTS / request.param


@pytest.fixture(scope="module")
def engine(model):
    with Engine.load(model, device="cpu", slots=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def conversation(engine):
    """A chat with a long answer, and the answer to its last question without reuse."""
    story = engine.generate(STORY, GREEDY, reuse_prefix=False).text
    messages = [*STORY, *chat("", story)[1:], *chat("Thank you! What's the capital of Italy?")]
    return messages, engine.generate(messages, GREEDY, reuse_prefix=False)


@pytest.mark.parametrize("name, limit", [("hybrid", 6_000_000), ("mixture", 5_000_000)])
def test_files_are_small(name, limit):
    assert sum(file.stat().st_size for file in (ARTIFACTS / name).iterdir()) <= limit
    assert json.loads((ARTIFACTS / name / "config.json").read_text())["architectures"] == [ARCHITECTURES[name]]


@pytest.mark.parametrize("question", QUESTIONS)
def test_answer_is_right(engine, question):
    result = engine.generate(chat(question), GREEDY)
    assert QUESTIONS[question].lower() in result.text.lower() and result.finish_reason == "stop"


def test_name_is_recalled(engine):
    assert "Nora" in engine.generate(RECALL, GREEDY).text


def test_story_is_fluent(engine):
    """It ends, mentions its subject and repeats no sentence."""
    result = engine.generate(STORY, GREEDY)
    sentences = [sentence.strip() for sentence in result.text.split(".") if sentence.strip()]
    assert result.finish_reason == "stop" and "fox" in result.text.lower()
    assert len(sentences) >= 4 and len(set(sentences)) == len(sentences)


def test_logits_equal_those_of_transformers(engine, model, conversation):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    messages, result = conversation
    ids = [*engine.tokenizer.encode_chat(messages), *result.token_ids]
    peer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for module in peer.modules():
        if hasattr(module, "gate_up_proj"):  # It computes in the dtype of its weights.
            module.float()
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0]
    scores = engine.score(ids)
    assert relative_rms(scores, expected) < TOLERANCES[model.name]
    assert torch.equal(scores.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(
    "options", [{"chunk_tokens": 64}, {"chunk_tokens": 100}, {"speculate": "ngram"}, {"batch_invariant": True}], ids=str
)
def test_text_does_not_depend_on_the_passes(model, conversation, options):
    messages, expected = conversation
    with Engine.load(model, device="cpu", **options) as engine:
        assert engine.generate(messages, GREEDY).token_ids == expected.token_ids


def test_text_does_not_depend_on_snapshots(engine, conversation):
    messages, expected = conversation
    first = engine.generate(messages, GREEDY)
    again = engine.generate(messages, GREEDY)
    assert first.token_ids == again.token_ids == expected.token_ids and again.usage.reused_tokens >= 64
    edited = [*messages[:-1], *chat("What's the capital of France?")]
    result = engine.generate(edited, GREEDY)
    assert result.usage.reused_tokens >= 64 and "Paris" in result.text
    assert result.token_ids == engine.generate(edited, GREEDY, reuse_prefix=False).token_ids


def test_text_does_not_depend_on_neighbors(engine):
    prompts = [chat(question) for question in QUESTIONS]
    alone = [engine.generate(prompt, GREEDY, reuse_prefix=False).token_ids for prompt in prompts]
    assert [result.token_ids for result in engine.generate_many(prompts, GREEDY)] == alone
